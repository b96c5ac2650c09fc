//! From a verified program to machine code: Cranelift, set up once; [`super::emit`] writes what it
//! compiles.

use cranelift_codegen::Context;
use cranelift_codegen::control::ControlPlane;
use cranelift_codegen::ir::types::{I32, I64};
use cranelift_codegen::ir::{AbiParam, Signature};
use cranelift_codegen::isa::{CallConv, OwnedTargetIsa};
use cranelift_codegen::settings::{self, Configurable};
use cranelift_frontend::{FunctionBuilder, FunctionBuilderContext};

use super::emit::Emitter;
use vnplug_bpf::Instruction;

/// Translates programs, one after the other.
pub(super) struct Translator {
    isa: OwnedTargetIsa,
    context: Context,
    functions: FunctionBuilderContext,
}

/// Machine code of one program; only [`Translator::translate`] makes it.
pub(super) struct Translated {
    bytes: Vec<u8>,
    key: u32,
}

impl Translated {
    pub(super) fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// What it must be called with.
    pub(super) fn key(&self) -> u32 {
        self.key
    }
}

impl Translator {
    /// A translator for the processor that this runs on.
    ///
    /// # Errors
    /// Why there is none, for people.
    pub(super) fn new() -> Result<Self, String> {
        let mut flags = settings::builder();
        let verify = if cfg!(debug_assertions) {
            "true"
        } else {
            "false"
        };
        for (name, value) in [
            ("opt_level", "speed"),
            ("enable_verifier", verify),
            ("enable_probestack", "false"),
            ("unwind_info", "false"),
        ] {
            flags.set(name, value).map_err(|error| error.to_string())?;
        }
        let name = format!("{}-unknown-linux", std::env::consts::ARCH);
        let isa = cranelift_codegen::isa::lookup_by_name(&name)
            .map_err(|error| error.to_string())?
            .finish(settings::Flags::new(flags))
            .map_err(|error| error.to_string())?;
        Ok(Self {
            isa,
            context: Context::new(),
            functions: FunctionBuilderContext::new(),
        })
    }

    /// Translates verified instructions that do not loop.
    ///
    /// # Errors
    /// Cranelift's words; the program is none the worse for it.
    pub(super) fn translate(
        &mut self,
        instructions: &[Instruction],
        key: u32,
    ) -> Result<Translated, String> {
        self.context.clear();
        self.context.func.signature = signature();
        let builder = FunctionBuilder::new(&mut self.context.func, &mut self.functions);
        let mut emitter = Emitter::new(builder, instructions, key);
        for at in 0..instructions.len() {
            emitter.step(at);
        }
        emitter.end(self.isa.frontend_config());
        let compiled = self
            .context
            .compile(&*self.isa, &mut ControlPlane::default())
            .map_err(|error| error.inner.to_string())?;
        if !compiled.buffer.relocs().is_empty() {
            return Err("its code refers to something outside of it".into());
        }
        Ok(Translated {
            bytes: compiled.code_buffer().to_vec(),
            key,
        })
    }
}

/// As [`super::code::Entry`].
fn signature() -> Signature {
    let mut signature = Signature::new(CallConv::SystemV);
    let params = [I64, I64, I32, I32].map(AbiParam::new);
    signature.params.extend(params);
    signature.returns.push(AbiParam::new(I32));
    signature
}

#[cfg(test)]
mod tests {
    use super::*;
    use vnplug_bpf::code;

    fn op(code: u16, k: u32) -> Instruction {
        Instruction {
            code,
            jt: 0,
            jf: 0,
            k,
        }
    }

    #[test]
    #[cfg(target_arch = "x86_64")]
    fn each_check_replaces_the_address_without_a_branch() {
        let moves = |list: &[Instruction]| {
            let code = Translator::new().unwrap().translate(list, 0).unwrap();
            // REX.W 0F 4x: cmovcc of 64 bits, which nothing else of these programs needs.
            let is_move =
                |it: &&[u8]| it[0] & 0xf8 == 0x48 && it[1] == 0x0f && it[2] & 0xf0 == 0x40;
            code.bytes().windows(3).filter(is_move).count()
        };
        assert_eq!(moves(&[op(code::LD_LEN, 0), op(code::RET_A, 0)]), 0);
        assert_eq!(moves(&[op(code::LD_W_ABS, 8), op(code::RET_A, 0)]), 1);
        let two = [
            op(code::LDX_MSH, 14),
            op(code::LD_H_IND, 14),
            op(code::RET_A, 0),
        ];
        assert_eq!(moves(&two), 2);
    }

    #[test]
    fn constants_of_a_guest_do_not_stand_in_the_code() {
        let branch = Instruction {
            jt: 1,
            ..op(code::JEQ_K, 0x0c32_9090)
        };
        let list = [
            op(code::LD_W_ABS, 0x0c31_9090),
            branch,
            op(code::RET, 0x0c33_9090),
            op(code::LDX_IMM, 0x0c34_9090),
            op(code::LD_B_IND, 0x0c35_9090),
            op(code::XOR_K, 0x0c36_9090),
            op(code::RET_A, 0),
        ];
        let mut translator = Translator::new().unwrap();
        let hidden = translator.translate(&list, 0x1357_9bdf).unwrap();
        let plain = translator.translate(&list, 0).unwrap();
        for word in 0x0c31_u16..=0x0c36 {
            let at = |code: &Translated| {
                let [low, high] = word.to_le_bytes();
                code.bytes().windows(3).any(|it| it == [0x90, low, high])
            };
            assert!(at(&plain) && !at(&hidden), "{word:x}");
        }
    }
}
