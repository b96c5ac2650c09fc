//! A pool in a virtio-pmem device, as the kernel of a guest finds it.
//!
//! ```text
//! the file    0        4 KiB      8 KiB …         2 MiB                         end
//!             │ empty  │ header   │ empty         │ the pool, see crate::pool
//! the guest                                       └ byte 0 of /dev/daxN.0
//! ```
//!
//! The header is the kernel's own (drivers/nvdimm/pfn.h, `struct nd_pfn_sb`): with it in the file a device is
//! a device-dax by itself, without a tool of the guest's. The host writes it before QEMU gets the file. Its
//! UUID begins with [`PREFIX`], by which the guest's agent finds the device; then comes the pool's number.

use crate::region::Region;

/// Bytes of the file before the pool: the pool begins at a huge page.
pub const FRONT: u64 = 2 << 20;
/// A file's length, and so a pool's, is a multiple of this: the guest's kernel maps no other.
pub const STEP: u64 = 2 << 20;
/// First eight bytes of the UUID.
pub const PREFIX: [u8; 8] = *b"VNPLPMEM";

const AT: u64 = 4096;
const LEN: usize = 4096;
const PAGE: u64 = 4096;

/// Writes the header; `file` is the whole file or its first bytes, `pool_len` the length of the pool with the
/// number `id` behind it. Written again it is the same bytes: a guest's kernel may read them meanwhile.
///
/// # Panics
/// If `file` is shorter than its first 8 KiB.
pub fn write_header(file: &Region, pool_len: u64, id: u64) {
    file.write(AT, &header(pool_len, id));
}

fn header(pool_len: u64, id: u64) -> [u8; LEN] {
    let mut bytes = [0; LEN];
    let mut put = |at: usize, field: &[u8]| bytes[at..at + field.len()].copy_from_slice(field);
    put(0, b"NVDIMM_DAX_INFO\0");
    put(16, &PREFIX);
    put(24, &id.to_le_bytes());
    // Version 1.4.
    put(52, &1_u16.to_le_bytes());
    put(54, &4_u16.to_le_bytes());
    put(56, &FRONT.to_le_bytes());
    put(64, &(pool_len / PAGE).to_le_bytes());
    // 1: the kernel keeps what it knows of the pages in its own memory, and not in the file, where the host
    // could write it.
    put(72, &1_u32.to_le_bytes());
    // Mapped in multiples of a page, as applications map ivshmem.
    put(84, &(PAGE as u32).to_le_bytes());
    put(88, &(PAGE as u32).to_le_bytes());
    // sizeof(struct page)
    put(92, &64_u16.to_le_bytes());
    let sum = checksum(&bytes);
    bytes[LEN - 8..].copy_from_slice(&sum.to_le_bytes());
    bytes
}

/// `nd_fletcher64` of a header whose own sum is 0.
fn checksum(bytes: &[u8; LEN]) -> u64 {
    let (mut low, mut high) = (0_u32, 0_u64);
    for word in bytes.as_chunks::<4>().0 {
        low = low.wrapping_add(u32::from_le_bytes(*word));
        high = high.wrapping_add(u64::from(low));
    }
    high << 32 | u64::from(low)
}

/// Whether a UUID, as the guest's kernel writes it, is one of ours.
pub fn is_ours(uuid: &str) -> bool {
    let mut digits = uuid.trim().bytes().filter(|&byte| byte != b'-');
    let mut next = || Some(char::from(digits.next()?).to_digit(16)? as u8);
    PREFIX
        .iter()
        .all(|&byte| next().zip(next()).map(|(high, low)| high << 4 | low) == Some(byte))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_uuids_with_our_prefix_are_ours() {
        assert!(is_ours("564e504c-504d-454d-2a00-000000000000\n"));
        for other in ["", "564e504c", "664e504c-504d-454d-2a00-000000000000", "ä"] {
            assert!(!is_ours(other), "{other}");
        }
    }

    #[test]
    fn the_header_has_its_sum_and_is_the_same_when_it_is_written_again() {
        let file = Region::heap(8192);
        let read = || {
            let mut bytes = [0; LEN];
            file.read(AT, &mut bytes);
            bytes
        };
        write_header(&file, 1 << 20, 42);
        let first = read();
        // The sum of all words but its own two, which count as zeros: each adds the low half once more.
        let (mut low, mut high) = (0_u32, 0_u64);
        for word in first[..LEN - 8].as_chunks::<4>().0 {
            low = low.wrapping_add(u32::from_le_bytes(*word));
            high += u64::from(low);
        }
        high += 2 * u64::from(low);
        assert_eq!(
            first[LEN - 8..],
            (high << 32 | u64::from(low)).to_le_bytes()
        );
        assert_eq!(first[24..32], 42_u64.to_le_bytes());
        write_header(&file, 1 << 20, 42);
        assert_eq!(read(), first);
    }
}
