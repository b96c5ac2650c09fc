//! The frames of a capture file that is to be sent: classic pcap, of Ethernet, whole in memory.

use std::path::Path;

use crate::failure::Failure;

/// Reads a file's frames in their order.
///
/// # Errors
/// Why it cannot be read or is no such file, with the place of the damage.
pub(super) fn read_frames(path: &Path) -> Result<Vec<Vec<u8>>, Failure> {
    let about = |why: String| Failure::about(path.display(), why);
    let bytes = std::fs::read(path).map_err(|error| about(error.to_string()))?;
    parse(&bytes).map_err(about)
}

fn parse(bytes: &[u8]) -> Result<Vec<Vec<u8>>, String> {
    let Some((header, mut rest)) = bytes.split_first_chunk::<HEADER>() else {
        return Err("too short for a capture file".into());
    };
    let magic = [header[0], header[1], header[2], header[3]];
    let read: fn([u8; 4]) -> u32 = match u32::from_le_bytes(magic) {
        MICROSECONDS | NANOSECONDS => u32::from_le_bytes,
        swapped if [MICROSECONDS, NANOSECONDS].contains(&swapped.swap_bytes()) => {
            u32::from_be_bytes
        }
        PCAPNG => return Err("a pcapng file; convert it: tcpdump -r FILE -w FILE.pcap".into()),
        _ => return Err("not a pcap file".into()),
    };
    let link_type = read([header[20], header[21], header[22], header[23]]) & 0xffff;
    if link_type != ETHERNET {
        return Err(format!(
            "its link type is {link_type}, and only Ethernet (1) is sent"
        ));
    }
    let mut frames = Vec::new();
    while !rest.is_empty() {
        let at = bytes.len() - rest.len();
        let cut = || format!("the file ends within the record at byte {at}");
        let (record, after) = rest.split_first_chunk::<RECORD>().ok_or_else(cut)?;
        let len = read([record[8], record[9], record[10], record[11]]) as usize;
        let (frame, after) = after.split_at_checked(len).ok_or_else(cut)?;
        frames.push(frame.to_vec());
        rest = after;
    }
    if frames.is_empty() {
        return Err("no frames in it".into());
    }
    Ok(frames)
}

const HEADER: usize = 24;
const RECORD: usize = 16;
const MICROSECONDS: u32 = 0xa1b2_c3d4;
const NANOSECONDS: u32 = 0xa1b2_3c4d;
const PCAPNG: u32 = 0x0a0d_0d0a;
const ETHERNET: u32 = 1;

#[cfg(test)]
mod tests {
    use super::*;

    fn file(magic: u32, link_type: u32, frames: &[&[u8]], word: fn(u32) -> [u8; 4]) -> Vec<u8> {
        let mut bytes = word(magic).to_vec();
        bytes.extend([0; 16]);
        bytes.extend(word(link_type));
        for frame in frames {
            bytes.extend([0; 8]);
            bytes.extend(word(frame.len() as u32));
            bytes.extend(word(frame.len() as u32));
            bytes.extend(*frame);
        }
        bytes
    }

    #[test]
    fn frames_of_either_byte_order_are_read_and_damage_is_named() {
        for word in [u32::to_le_bytes, u32::to_be_bytes] {
            for magic in [MICROSECONDS, NANOSECONDS] {
                let bytes = file(magic, ETHERNET, &[b"one", b"", b"three"], word);
                let frames = parse(&bytes).unwrap();
                assert_eq!(frames, [&b"one"[..], b"", b"three"]);
                for cut in 0..bytes.len() {
                    // A cut between two records is a shorter file.
                    let whole = [43, 59].contains(&cut);
                    assert_eq!(parse(&bytes[..cut]).is_ok(), whole, "{cut}");
                }
            }
        }
        let raw = file(MICROSECONDS, 101, &[b"x"], u32::to_le_bytes);
        assert!(parse(&raw).unwrap_err().contains("101"));
        assert!(
            parse(&[0x0a, 0x0d, 0x0d, 0x0a].repeat(9))
                .unwrap_err()
                .contains("pcapng")
        );
    }
}
