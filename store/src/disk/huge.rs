//! Huge pages for memory that the disk reads from.

#![expect(unsafe_code, reason = "madvise(2) takes memory by its address")]

use rustix::mm::{Advice, madvise};

/// Bytes of a huge page of x86-64, and of arm64 with pages of 4 KiB.
pub(super) const HUGE: usize = 2 << 20;

/// Asks for huge pages (`MADV_HUGEPAGE`, Linux 2.6.38) for memory that begins at a multiple of [`HUGE`]
/// and was not touched. The kernel may have none, or not let us: that changes nothing but the speed.
pub(super) fn huge_pages(bytes: &mut [u8]) {
    // SAFETY: the range is memory of ours. The advice changes how its pages are made, not what they hold.
    let _ = unsafe {
        madvise(
            bytes.as_mut_ptr().cast(),
            bytes.len(),
            Advice::LinuxHugepage,
        )
    };
}
