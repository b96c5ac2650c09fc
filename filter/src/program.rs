//! A filter as the data path has it: a verified program, and what is known of it and made of it.

use std::fmt;
use std::hash::{Hash, Hasher};
use std::sync::{Arc, OnceLock};

use vnplug_bpf::{Instruction, OutOfSteps, Trust, VerifyError};
use vnplug_os::prefetch::{self, prefetch};

use super::analyse::{self, Analysis};
use super::native::NativeSlot;

/// A verified program; cloning shares it, and the native code that it may get.
#[derive(Clone)]
pub struct Program {
    bpf: vnplug_bpf::Program,
    analysis: Arc<OnceLock<Analysis>>,
    native: Arc<NativeSlot>,
}

impl Program {
    /// As [`vnplug_bpf::Program::from_bytes`].
    ///
    /// # Errors
    /// [`VerifyError`] with the first rule that is broken; the sender's fault.
    pub fn from_bytes(bytes: &[u8], trust: Trust) -> Result<Self, VerifyError> {
        vnplug_bpf::Program::from_bytes(bytes, trust).map(Self::from)
    }

    /// As [`vnplug_bpf::Program::from_instructions`].
    ///
    /// # Errors
    /// As [`Program::from_bytes`].
    pub fn from_instructions(
        instructions: &[Instruction],
        trust: Trust,
    ) -> Result<Self, VerifyError> {
        vnplug_bpf::Program::from_instructions(instructions, trust).map(Self::from)
    }

    /// A program that accepts every frame, cut to `snaplen` bytes (0 rejects every frame).
    pub fn accept(snaplen: u32) -> Self {
        vnplug_bpf::Program::accept(snaplen).into()
    }

    /// As [`vnplug_bpf::Program::broken`]: panics on every frame.
    #[doc(hidden)]
    pub fn broken() -> Self {
        vnplug_bpf::Program::broken().into()
    }

    /// The wire form that [`Program::from_bytes`] reads.
    pub fn to_bytes(&self) -> Vec<u8> {
        self.bpf.to_bytes()
    }

    /// The instructions as they were given.
    pub fn instructions(&self) -> &[Instruction] {
        self.bpf.instructions()
    }

    /// True if it jumps backwards somewhere; [`Trust::Guest`] would have refused it.
    pub fn loops(&self) -> bool {
        self.bpf.loops()
    }

    /// On which frames it must be run at all. The first call finds that out, in up to ten
    /// milliseconds of processor time (`analysis_at_its_worst`); most filters take some
    /// microseconds.
    pub fn analysis(&self) -> &Analysis {
        self.analysis.get_or_init(|| analyse::analyse(self))
    }

    /// Prefetches what running the program needs: what the program itself points to (`far` is
    /// false), or the machine code that this points to.
    #[inline(always)]
    pub(super) fn prefetch(&self, far: bool) {
        if !far {
            prefetch(&*self.native);
        } else if let Some(native) = self.native.get() {
            native.prefetch();
        } else {
            prefetch::address(self.bpf.entry());
        }
    }

    /// How many bytes of a frame the filter wants: 0 is "not this frame", and a number may be
    /// larger than the frame.
    ///
    /// As [`vnplug_bpf::Program::run`], by machine code if there is some by now.
    #[inline]
    pub fn run(&self, bytes: &[u8], wire_len: u32) -> u32 {
        self.judge(bytes, wire_len).unwrap_or(0)
    }

    /// As [`Program::run`], but says when the meter ran out.
    ///
    /// # Errors
    /// [`OutOfSteps`]: reject the frame and count it. Only programs that loop can do this.
    #[inline]
    pub fn judge(&self, bytes: &[u8], wire_len: u32) -> Result<u32, OutOfSteps> {
        // A program that loops never gets native code.
        if let Some(native) = self.native.get() {
            return Ok(native.run(bytes, wire_len));
        }
        self.interpret(bytes, wire_len)
    }

    /// As [`Program::judge`], by the interpreter in any case.
    ///
    /// # Errors
    /// As [`Program::judge`].
    #[inline]
    pub fn interpret(&self, bytes: &[u8], wire_len: u32) -> Result<u32, OutOfSteps> {
        self.bpf.judge(bytes, wire_len)
    }

    /// Whether it runs as machine code by now.
    pub fn is_native(&self) -> bool {
        self.native.get().is_some()
    }

    /// What is translated, and where the native code goes.
    pub(super) fn parts(&self) -> (&Arc<[Instruction]>, &Arc<NativeSlot>) {
        (self.bpf.instructions(), &self.native)
    }
}

impl From<vnplug_bpf::Program> for Program {
    fn from(bpf: vnplug_bpf::Program) -> Self {
        Self {
            bpf,
            analysis: Arc::default(),
            native: Arc::default(),
        }
    }
}

impl fmt::Debug for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.bpf.fmt(f)
    }
}

impl PartialEq for Program {
    fn eq(&self, other: &Self) -> bool {
        self.bpf == other.bpf
    }
}

impl Eq for Program {}

impl Hash for Program {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.bpf.hash(state);
    }
}
