//! Bounds that hold also on a path that the processor only guesses (Spectre v1).
#![cfg_attr(
    target_arch = "x86_64",
    expect(
        unsafe_code,
        reason = "two instructions that the compiler must not replace by a branch"
    )
)]

/// `index` if `end` is at most `len`, else the largest number; without a branch, which could be
/// mispredicted.
///
/// A load at the largest number begins one byte before its slice, if it is guessed to be allowed,
/// and not at a place of an attacker's choice.
#[inline(always)]
pub(crate) fn confined(index: usize, end: usize, len: usize) -> usize {
    #[cfg(target_arch = "x86_64")]
    {
        let outside: usize;
        // SAFETY: compares two registers and spreads the carry over a third; no memory, no stack.
        unsafe {
            core::arch::asm!(
                "cmp {len}, {end}",
                "sbb {outside}, {outside}",
                len = in(reg) len,
                end = in(reg) end,
                outside = lateout(reg) outside,
                options(pure, nomem, nostack),
            );
        }
        index | outside
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        // Opaque to the compiler, which then has no reason to branch.
        index | std::hint::black_box(usize::from(len < end).wrapping_neg())
    }
}

#[cfg(test)]
mod tests {
    use super::confined;

    #[test]
    fn an_index_whose_end_is_outside_is_the_largest() {
        for (index, end, len, expected) in [
            (0, 1, 0, usize::MAX),
            (0, 1, 1, 0),
            (5, 7, 6, usize::MAX),
            (5, 7, 7, 5),
            (5, usize::MAX, 6, usize::MAX),
        ] {
            assert_eq!(
                confined(index, end, len),
                expected,
                "{index}..{end} of {len}"
            );
        }
    }
}
