use super::*;
use crate::{Program, Trust};

fn op(code: u16, k: u32) -> Instruction {
    Instruction {
        code,
        jt: 0,
        jf: 0,
        k,
    }
}

fn program(body: &[Instruction]) -> Program {
    Program::from_instructions(body, Trust::Operator).unwrap()
}

/// Runs `body`, then returns A; the frame is 00 01 02 … 0f with a wire length of 1500.
fn a_after(body: &[Instruction]) -> u32 {
    let frame: Vec<u8> = (0..16).collect();
    program(&[body, &[op(code::RET_A, 0)]].concat()).run(&frame, 1500)
}

#[test]
fn loads_are_big_endian_and_indexed_by_x() {
    let x = |k| op(code::LDX_IMM, k);
    let cases: &[(&[Instruction], u32)] = &[
        (&[op(code::LD_W_ABS, 1)], 0x0102_0304),
        (&[op(code::LD_H_ABS, 1)], 0x0102),
        (&[op(code::LD_B_ABS, 1)], 1),
        (&[x(2), op(code::LD_W_IND, 1)], 0x0304_0506),
        (&[x(2), op(code::LD_H_IND, 1)], 0x0304),
        (&[x(2), op(code::LD_B_IND, 1)], 3),
        (&[op(code::LD_LEN, 0)], 1500),
        (&[op(code::LDX_LEN, 0), op(code::TXA, 0)], 1500),
        (&[op(code::LD_IMM, 9)], 9),
        (&[op(code::LDX_MSH, 15), op(code::TXA, 0)], 60),
        (
            &[
                op(code::LD_IMM, 9),
                op(code::TAX, 0),
                op(code::LD_IMM, 1),
                op(code::TXA, 0),
            ],
            9,
        ),
        (
            &[
                op(code::LD_IMM, 8),
                op(code::ST, 15),
                op(code::LD_IMM, 1),
                op(code::LD_MEM, 15),
            ],
            8,
        ),
        (
            &[
                x(8),
                op(code::STX, 0),
                x(1),
                op(code::LDX_MEM, 0),
                op(code::TXA, 0),
            ],
            8,
        ),
        (&[op(code::LD_IMM, 1), op(code::LD_MEM, 3)], 0),
    ];
    for (body, a) in cases {
        assert_eq!(a_after(body), *a, "{body:?}");
    }
}

#[test]
fn a_load_rejects_the_frame_from_the_first_byte_beyond_it() {
    // The frame has 16 bytes: (operation, last good offset).
    let absolute = [
        (code::LD_W_ABS, 12),
        (code::LD_H_ABS, 14),
        (code::LD_B_ABS, 15),
        (code::LDX_MSH, 15),
    ];
    let indexed = [
        (code::LD_W_IND, 12),
        (code::LD_H_IND, 14),
        (code::LD_B_IND, 15),
    ];
    let accepts = |load: &[Instruction]| {
        program(&[load, &[op(code::RET, 1)]].concat()).run(&[0; 16], 1500) == 1
    };
    for (code, last) in absolute {
        assert!(
            accepts(&[op(code, last)]) && !accepts(&[op(code, last + 1)]),
            "{code:#x}"
        );
        assert!(!accepts(&[op(code, 0x7fff_ffff)]), "{code:#x}");
    }
    for (code, last) in indexed {
        let at = |x, k| accepts(&[op(code::LDX_IMM, x), op(code, k)]);
        assert!(at(last, 0) && at(0, last) && at(1, last - 1), "{code:#x}");
        assert!(
            !at(last + 1, 0) && !at(0, last + 1) && !at(2, last - 1),
            "{code:#x}"
        );
        // No wrap-around: X = -1 does not reach byte k - 1.
        assert!(
            !at(u32::MAX, 5) && !at(5, u32::MAX) && !at(u32::MAX, u32::MAX),
            "{code:#x}"
        );
    }
    // The same with a comparison after it, which shares its step.
    let compare = |code, k| {
        let body = [op(code, k), op(code::JEQ_K, 0), op(code::RET, 1)];
        program(&body).run(&[0; 16], 1500)
    };
    for (code, last) in &absolute[..3] {
        assert_eq!(
            (compare(*code, *last), compare(*code, *last + 1)),
            (1, 0),
            "{code:#x}"
        );
    }
}

#[test]
fn arithmetic_is_32_bit_and_wraps() {
    let cases: &[(u16, u16, u32, u32, u32)] = &[
        (code::ADD_K, code::ADD_X, u32::MAX, 2, 1),
        (code::SUB_K, code::SUB_X, 1, 2, u32::MAX),
        (code::MUL_K, code::MUL_X, 0x8000_0001, 2, 2),
        (code::DIV_K, code::DIV_X, 7, 2, 3),
        (code::MOD_K, code::MOD_X, 7, 4, 3),
        (code::AND_K, code::AND_X, 6, 3, 2),
        (code::OR_K, code::OR_X, 6, 3, 7),
        (code::XOR_K, code::XOR_X, 6, 3, 5),
        (code::LSH_K, code::LSH_X, 3, 31, 0x8000_0000),
        (code::RSH_K, code::RSH_X, 0x8000_0000, 31, 1),
    ];
    for (by_k, by_x, a, operand, result) in cases {
        assert_eq!(
            a_after(&[op(code::LD_IMM, *a), op(*by_k, *operand)]),
            *result,
            "{by_k:#x}"
        );
        let body = [
            op(code::LD_IMM, *a),
            op(code::LDX_IMM, *operand),
            op(*by_x, 0),
        ];
        assert_eq!(a_after(&body), *result, "{by_x:#x}");
    }
    assert_eq!(a_after(&[op(code::LD_IMM, 1), op(code::NEG, 0)]), u32::MAX);
    for shift in [code::LSH_X, code::RSH_X] {
        let body = [op(code::LD_IMM, 5), op(code::LDX_IMM, 32), op(shift, 0)];
        assert_eq!(a_after(&body), 0);
    }
}

#[test]
fn division_by_x_of_zero_rejects_the_frame() {
    for code in [code::DIV_X, code::MOD_X] {
        let body = [
            op(code::LD_IMM, 5),
            op(code::LDX_IMM, 0),
            op(code, 0),
            op(code::RET, 1),
        ];
        assert_eq!(program(&body).run(&[], 0), 0);
    }
}

#[test]
fn comparisons_are_unsigned() {
    let table: &[(u16, u16, u32, u32, bool)] = &[
        (code::JEQ_K, code::JEQ_X, 5, 5, true),
        (code::JEQ_K, code::JEQ_X, 5, 6, false),
        (code::JGT_K, code::JGT_X, u32::MAX, 1, true),
        (code::JGT_K, code::JGT_X, 1, 1, false),
        (code::JGE_K, code::JGE_X, 1, 1, true),
        (code::JGE_K, code::JGE_X, 0, 0x8000_0000, false),
        (code::JSET_K, code::JSET_X, 6, 2, true),
        (code::JSET_K, code::JSET_X, 6, 1, false),
    ];
    for (by_k, by_x, a, b, holds) in table {
        for code in [*by_k, *by_x] {
            let jump = Instruction {
                code,
                jt: 0,
                jf: 1,
                k: *b,
            };
            let body = [
                op(code::LD_IMM, *a),
                op(code::LDX_IMM, *b),
                jump,
                op(code::RET, 1),
                op(code::RET, 2),
            ];
            assert_eq!(
                program(&body).run(&[], 0),
                if *holds { 1 } else { 2 },
                "{code:#x}"
            );
        }
    }
}

#[test]
fn a_jump_may_lead_to_a_comparison_that_follows_a_load() {
    let jump = Instruction {
        code: code::JEQ_K,
        jt: 0,
        jf: 1,
        k: 9,
    };
    let body = [
        op(code::LD_IMM, 9),
        op(code::JA, 1),
        op(code::LD_B_ABS, 0),
        jump,
        op(code::RET, 1),
        op(code::RET, 2),
    ];
    assert_eq!(program(&body).run(&[3], 1), 1);
}

#[test]
fn a_loop_ends_with_its_work_or_with_its_budget() {
    // A counts down from `turns`: 3 instructions back per turn.
    let count_down = |turns| {
        let leave = Instruction {
            code: code::JEQ_K,
            jt: 1,
            jf: 0,
            k: 0,
        };
        program(&[
            op(code::LD_IMM, turns),
            op(code::SUB_K, 1),
            leave,
            op(code::JA, (-3_i32).cast_unsigned()),
            op(code::RET, 1),
        ])
    };
    assert_eq!(count_down(1).judge(&[], 0), Ok(1));
    assert_eq!(count_down(20_000).judge(&[], 0), Ok(1));
    assert_eq!(count_down(30_000).judge(&[], 0), Err(OutOfSteps));
    assert_eq!(count_down(30_000).run(&[], 0), 0);
    let itself = program(&[op(code::JA, u32::MAX), op(code::RET, 1)]);
    assert_eq!(itself.judge(&[], 0), Err(OutOfSteps));
}

#[test]
fn the_accept_program_wants_its_snaplen() {
    assert_eq!(Program::accept(96).run(&[], 0), 96);
    assert_eq!(Program::accept(96).run(&[0; 1514], 1514), 96);
}

/// `tcpdump -ddd 'tcp port 80'` on Ethernet, by libpcap 1.10.3, without its IPv6 half.
#[test]
fn golden_tcp_port_80() {
    let listing = "40 0 0 12,21 0 10 2048,48 0 0 23,21 0 8 6,40 0 0 20,69 6 0 8191,177 0 0 14,\
                   72 0 0 14,21 2 0 80,72 0 0 16,21 0 1 80,6 0 0 262144,6 0 0 0";
    let body: Vec<Instruction> = listing
        .split(',')
        .map(|line| {
            let n: Vec<u32> = line.split(' ').map(|n| n.parse().unwrap()).collect();
            Instruction {
                code: n[0] as u16,
                jt: n[1] as u8,
                jf: n[2] as u8,
                k: n[3],
            }
        })
        .collect();
    let filter = Program::from_instructions(&body, Trust::Guest).unwrap();
    let mut frame = [0_u8; 60];
    frame[12..14].copy_from_slice(&[8, 0]);
    frame[14] = 0x46;
    frame[23] = 6;
    frame[40..42].copy_from_slice(&80_u16.to_be_bytes());
    assert_eq!(filter.run(&frame, 60), 262_144);
    frame[20] = 0x20; // more fragments, but the first one
    assert_eq!(filter.run(&frame, 60), 262_144);
    frame[21] = 1; // a later one has no ports
    assert_eq!(filter.run(&frame, 60), 0);
    frame[21] = 0;
    assert_eq!(filter.run(&frame[..41], 60), 0);
    frame[40..44].copy_from_slice(&[0, 81, 0, 80]);
    assert_eq!(filter.run(&frame, 60), 0);
}
