//! One check for many loads.
//!
//! A frame too short for *any* load on the way is rejected, so the first load may check for all
//! that must follow before the frame can be accepted. [`needs`] finds, walking backwards, how long
//! a frame must be at each instruction for acceptance to be possible at all. A path that ends in
//! `ret 0` requires nothing, because rejecting early is the same there. The same is done for loads
//! at offsets from X, until X changes.

use vnplug_bpf::{Instruction, code};

/// Bytes that a frame has, or must have: in all, and from X on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Reach {
    pub(super) frame: u64,
    pub(super) behind_x: u64,
}

impl Reach {
    pub(super) const NOTHING: Self = Self {
        frame: 0,
        behind_x: 0,
    };
    /// No frame is long enough.
    pub(super) const NEVER: Self = Self {
        frame: u64::MAX,
        behind_x: u64::MAX,
    };

    pub(super) fn or(self, other: Self) -> Self {
        Self {
            frame: self.frame.min(other.frame),
            behind_x: self.behind_x.min(other.behind_x),
        }
    }
}

/// Bytes that a frame must have at each instruction if it can still be accepted.
pub(super) fn needs(list: &[Instruction]) -> Vec<Reach> {
    use code::*;
    let mut needs = vec![Reach::NOTHING; list.len()];
    for (at, i) in list.iter().enumerate().rev() {
        // The last instruction is a return, which nothing follows.
        let next = needs.get(at + 1).copied().unwrap_or(Reach::NEVER);
        needs[at] = match i.code {
            RET if i.k == 0 => Reach::NEVER,
            RET | RET_A => Reach::NOTHING,
            JA => needs[at + 1 + i.k as usize],
            code if is_branch(code) => {
                let [yes, no] = targets(at, *i);
                needs[yes].or(needs[no])
            }
            LDX_MSH => Reach {
                frame: next.frame.max(u64::from(i.k) + 1),
                behind_x: 0,
            },
            LDX_IMM | LDX_MEM | LDX_LEN | TAX => Reach {
                behind_x: 0,
                ..next
            },
            code => match load(code) {
                Some((Mode::Absolute, size)) => Reach {
                    frame: next.frame.max(u64::from(i.k) + size),
                    ..next
                },
                Some((Mode::BehindX, size)) => Reach {
                    behind_x: next.behind_x.max(u64::from(i.k) + size),
                    ..next
                },
                None => next,
            },
        };
    }
    needs
}

#[derive(Debug, Clone, Copy)]
pub(super) enum Mode {
    Absolute,
    BehindX,
}

/// A load into A: from where, and how many bytes.
pub(super) fn load(code: u16) -> Option<(Mode, u64)> {
    use code::*;
    Some(match code {
        LD_W_ABS => (Mode::Absolute, 4),
        LD_H_ABS => (Mode::Absolute, 2),
        LD_B_ABS => (Mode::Absolute, 1),
        LD_W_IND => (Mode::BehindX, 4),
        LD_H_IND => (Mode::BehindX, 2),
        LD_B_IND => (Mode::BehindX, 1),
        _ => return None,
    })
}

pub(super) fn is_branch(code: u16) -> bool {
    code & 0x07 == 0x05 && code != code::JA
}

/// Where a comparison goes.
pub(super) fn targets(at: usize, i: Instruction) -> [usize; 2] {
    [i.jt, i.jf].map(|skip| at + 1 + usize::from(skip))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn op(code: u16, k: u32) -> Instruction {
        Instruction {
            code,
            jt: 0,
            jf: 0,
            k,
        }
    }

    #[test]
    fn the_first_load_asks_for_all_that_must_follow() {
        let branch = Instruction {
            jt: 0,
            jf: 2,
            ..op(code::JEQ_K, 0x800)
        };
        let list = [
            op(code::LD_H_ABS, 12),
            branch,
            op(code::LD_W_ABS, 26),
            op(code::RET, 1),
            op(code::RET, 0),
        ];
        assert_eq!(needs(&list)[0].frame, 30);
        let mut other = list;
        other[4] = op(code::RET, 1);
        assert_eq!(
            needs(&other)[0].frame,
            14,
            "a way that accepts needs no more"
        );
    }

    #[test]
    fn what_lies_behind_x_is_forgotten_when_x_changes() {
        let list = [
            op(code::LDX_MSH, 14),
            op(code::LD_H_IND, 14),
            op(code::LD_H_IND, 16),
            op(code::LDX_IMM, 0),
            op(code::LD_W_IND, 100),
            op(code::RET, 1),
        ];
        let needs = needs(&list);
        assert_eq!((needs[0].frame, needs[1].behind_x), (15, 18));
        assert_eq!(needs[4].behind_x, 104);
    }
}
