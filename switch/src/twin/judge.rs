//! The daemon's instance: the classifier's own instructions, as confined machine code, on the same memory.

use vnplug_os::bpf::{Insn, Shared};
use vnplug_twin::{Code, CodeError, Context, Instance, Meta, SharedMap};

use super::program::{INNER, SHOT};
use crate::forward::Number;

/// Decides about frames of all ports.
#[derive(Debug)]
pub(crate) struct Judge(Instance);

/// What becomes of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// It goes to this port.
    Forward(Number),
    /// It is more than its port may send.
    Policed,
    /// It is not known: the daemon looks at it as without a twin.
    Refer,
}

impl Judge {
    /// # Errors
    /// There is no translator for this processor; no memory.
    pub(super) fn new(code: &[Insn], maps: [&Shared; 2]) -> Result<Self, CodeError> {
        let maps = maps.map(|it| SharedMap::new(it.array(), false));
        let maps = maps.into_iter().collect::<Result<Vec<_>, _>>()?;
        let code = Code::new(code, Context::Classifier, maps)?;
        Ok(Self(Instance::new(&code)?))
    }

    /// Of a port's frame, of which the first bytes are here, and `len` bytes in all.
    #[inline]
    pub(crate) fn ask(&mut self, from: Number, (frame, len): (&[u8], usize)) -> Verdict {
        let meta = Meta {
            interface: 1 << INNER | u32::from(from),
            wire_len: len as u32,
            ..Meta::default()
        };
        // It reads no more.
        let head = frame.get(..HEAD).unwrap_or(frame);
        let run = self.0.run(head, &meta);
        match (run.verdict, run.redirect) {
            (Some(REDIRECT), Some(to)) => Verdict::Forward(to as Number),
            (Some(verdict), _) if verdict == SHOT.cast_signed() => Verdict::Policed,
            _ => Verdict::Refer,
        }
    }
}

/// Bytes of an Ethernet header.
const HEAD: usize = 14;
/// `TC_ACT_REDIRECT`
const REDIRECT: i32 = 7;
