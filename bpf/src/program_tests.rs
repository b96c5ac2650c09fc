use super::*;

fn op(code: u16, k: u32) -> Instruction {
    Instruction {
        code,
        jt: 0,
        jf: 0,
        k,
    }
}

fn fork(code: u16, jt: u8, jf: u8) -> Instruction {
    Instruction { code, jt, jf, k: 1 }
}

const RET: Instruction = Instruction {
    code: code::RET,
    jt: 0,
    jf: 0,
    k: 7,
};

fn refused(instructions: &[Instruction], trust: Trust) -> Option<VerifyError> {
    Program::from_instructions(instructions, trust).err()
}

#[test]
fn exactly_the_operations_of_the_kernel_are_known() {
    let known: Vec<u16> = (0..=u16::MAX)
        .filter(|code| {
            let body = [op(*code, 1), RET, RET];
            !matches!(
                refused(&body, Trust::Guest),
                Some(VerifyError::UnknownOpcode { .. })
            )
        })
        .collect();
    // The table in chk_code_allowed, net/core/filter.c.
    let kernel = [
        0x00, 0x01, 0x02, 0x03, 0x04, 0x05, 0x06, 0x07, 0x0c, 0x14, 0x15, 0x16, 0x1c, 0x1d, 0x20,
        0x24, 0x25, 0x28, 0x2c, 0x2d, 0x30, 0x34, 0x35, 0x3c, 0x3d, 0x40, 0x44, 0x45, 0x48, 0x4c,
        0x4d, 0x50, 0x54, 0x5c, 0x60, 0x61, 0x64, 0x6c, 0x74, 0x7c, 0x80, 0x81, 0x84, 0x87, 0x94,
        0x9c, 0xa4, 0xac, 0xb1,
    ];
    assert_eq!(known, kernel);
}

#[test]
fn each_broken_rule_has_its_error() {
    use VerifyError::*;
    let operator = Trust::Operator;
    let cases: &[(&[Instruction], Trust, VerifyError)] = &[
        (&[], operator, Empty),
        (
            &[op(0x08, 0), RET],
            operator,
            UnknownOpcode { at: 0, code: 0x08 },
        ),
        (
            &[op(0xff15, 0), RET, RET],
            operator,
            UnknownOpcode {
                at: 0,
                code: 0xff15,
            },
        ),
        (
            &[op(code::JA, 1), RET],
            operator,
            JumpOutside { at: 0, target: 2 },
        ),
        (
            &[RET, op(code::JA, 0x7fff_ffff), RET],
            operator,
            JumpOutside {
                at: 1,
                target: 0x8000_0001,
            },
        ),
        (
            &[op(code::JA, u32::MAX - 1), RET],
            operator,
            JumpOutside { at: 0, target: -1 },
        ),
        (
            &[op(code::JA, u32::MAX), RET],
            Trust::Guest,
            BackwardJump { at: 0 },
        ),
        (
            &[RET, op(code::JA, u32::MAX - 1), RET],
            Trust::Guest,
            BackwardJump { at: 1 },
        ),
        (
            &[fork(code::JEQ_K, 1, 0), RET],
            operator,
            JumpOutside { at: 0, target: 2 },
        ),
        (
            &[fork(code::JSET_X, 0, 255), RET],
            operator,
            JumpOutside { at: 0, target: 256 },
        ),
        (
            &[RET, op(code::TAX, 0)],
            operator,
            NoReturnAtEnd { code: code::TAX },
        ),
        (
            &[op(code::DIV_K, 0), RET],
            operator,
            DivisionByZero { at: 0 },
        ),
        (
            &[op(code::MOD_K, 0), RET],
            operator,
            DivisionByZero { at: 0 },
        ),
        (
            &[op(code::LD_MEM, 16), RET],
            operator,
            ScratchOutside { at: 0, word: 16 },
        ),
        (
            &[op(code::LDX_MEM, 17), RET],
            operator,
            ScratchOutside { at: 0, word: 17 },
        ),
        (
            &[op(code::ST, 16), RET],
            operator,
            ScratchOutside { at: 0, word: 16 },
        ),
        (
            &[RET, op(code::STX, u32::MAX), RET],
            operator,
            ScratchOutside {
                at: 1,
                word: u32::MAX,
            },
        ),
        (
            &[op(code::LSH_K, 32), RET],
            operator,
            ShiftTooLarge { at: 0, bits: 32 },
        ),
        (
            &[op(code::RSH_K, 33), RET],
            operator,
            ShiftTooLarge { at: 0, bits: 33 },
        ),
        (
            &[op(code::LD_H_ABS, 0xffff_f004), RET],
            operator,
            KernelOffset {
                at: 0,
                offset: -4092,
            },
        ),
        (
            &[op(code::LD_B_ABS, 0xffe0_0000), RET],
            operator,
            KernelOffset {
                at: 0,
                offset: -0x20_0000,
            },
        ),
    ];
    for (body, trust, error) in cases {
        assert_eq!(refused(body, *trust), Some(*error), "{body:?}");
        assert!(error.to_string().len() > 20, "{error}");
    }
}

#[test]
fn the_last_allowed_value_of_each_rule_is_accepted() {
    let cases: &[&[Instruction]] = &[
        &[RET],
        &[op(code::JA, 0), RET],
        &[fork(code::JGE_X, 1, 0), RET, RET],
        &[
            op(code::LD_MEM, 15),
            op(code::ST, 15),
            op(code::LDX_MEM, 15),
            op(code::STX, 15),
            RET,
        ],
        &[op(code::LSH_K, 31), op(code::RSH_K, 31), RET],
        &[op(code::LD_W_ABS, 0xffdf_ffff), RET],
        &[op(code::LD_W_IND, u32::MAX), RET],
        &[op(code::DIV_K, 1), op(code::RET_A, 0)],
    ];
    for body in cases {
        assert_eq!(refused(body, Trust::Guest), None, "{body:?}");
    }
}

#[test]
fn length_is_1_to_4096_instructions() {
    let bytes = |len: usize| Program::accept(1).to_bytes().repeat(len);
    for len in [1, 2, MAX_INSTRUCTIONS] {
        let program = Program::from_bytes(&bytes(len), Trust::Guest).unwrap();
        assert_eq!(program.instructions().len(), len);
    }
    let long = Program::from_bytes(&bytes(4097), Trust::Guest);
    let (len, max) = (4097, 4096);
    assert_eq!(long, Err(VerifyError::TooLong { len, max }));
    assert_eq!(
        Program::from_bytes(&[], Trust::Guest),
        Err(VerifyError::Empty)
    );
    for len_bytes in [1, 7, 9, 15] {
        let ragged = Program::from_bytes(&bytes(2)[..len_bytes], Trust::Guest);
        assert_eq!(ragged, Err(VerifyError::Ragged { len_bytes }));
    }
}

#[test]
fn a_users_own_program_is_as_long_as_its_jumps_reach() {
    // The last comparison goes to the last instruction, whose index is the largest there is.
    let mut list = vec![op(code::LD_IMM, 1); MAX_OWN_INSTRUCTIONS - 3];
    list.extend([fork(code::JEQ_K, 1, 0), op(code::RET, 8), RET]);
    let program = Program::from_instructions(&list, Trust::Own).unwrap();
    assert_eq!(program.run(&[], 0), 7);
    list.insert(0, op(code::LD_IMM, 0));
    let (len, max) = (MAX_OWN_INSTRUCTIONS + 1, MAX_OWN_INSTRUCTIONS);
    assert_eq!(
        refused(&list, Trust::Own),
        Some(VerifyError::TooLong { len, max })
    );
}

#[test]
fn bytes_are_little_endian_code_jt_jf_k() {
    let bytes = [
        0x15, 0, 1, 0, 4, 3, 2, 1, 6, 0, 0, 0, 0, 0, 0, 0, 6, 0, 0, 0, 0, 0, 4, 0,
    ];
    let program = Program::from_bytes(&bytes, Trust::Guest).unwrap();
    let first = Instruction {
        code: code::JEQ_K,
        jt: 1,
        jf: 0,
        k: 0x0102_0304,
    };
    assert_eq!(program.instructions()[0], first);
    assert_eq!(program.instructions()[2].k, 0x4_0000);
    assert_eq!(program.to_bytes(), bytes);
}

#[test]
fn only_programs_that_jump_back_loop() {
    let back = [RET, op(code::JA, u32::MAX - 1), RET];
    assert!(
        Program::from_instructions(&back, Trust::Operator)
            .unwrap()
            .loops()
    );
    assert!(
        !Program::from_instructions(&[op(code::JA, 0), RET], Trust::Operator)
            .unwrap()
            .loops()
    );
}
