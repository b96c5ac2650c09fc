//! What is looked at in an object before `aya-obj` reads it: names of sections that libbpf knows and it does not, and memory that it
//! would take for sections without looking how much.
//!
//! libbpf's newer names for programs of traffic control (`SEC("tc")`) mean what `SEC("classifier")` does, the only
//! one that the reader of objects takes. So such a section is given that name before the object is read: the table of
//! section names is put once more behind the object, with one name more. Nothing else of the object changes; where
//! it makes no sense it is left as it is, and the reader says so.

use std::borrow::Cow;

/// What libbpf takes for a program that sees frames as they come in.
const NEW_NAMES: [&[u8]; 3] = [b"tc", b"tc/ingress", b"tcx/ingress"];
const OLD_NAME: &[u8] = b"classifier\0";

/// Bytes of memory for sections of which nothing is in the file (`.bss`). `None`: it is no ELF file of 64 bits, little endian,
/// with a table of sections.
pub(crate) fn absent_bytes(object: &[u8]) -> Option<u64> {
    let (first, count) = sections(object)?;
    let mut absent = 0_u64;
    // 0: more than the field can say, which no compiler leaves.
    for nth in 0..(count > 0).then_some(count)? {
        let at = first.checked_add(nth.checked_mul(SECTION_HEADER)?)?;
        if number::<4>(object, at.checked_add(4)?)? == NOT_IN_THE_FILE {
            absent = absent.saturating_add(number::<8>(object, at.checked_add(0x20)?)?);
        }
    }
    Some(absent)
}

/// Where the first header of a section is, and how many there are.
fn sections(object: &[u8]) -> Option<(usize, usize)> {
    // `Elf64_Ehdr`: magic, 64 bits, little endian, as clang leaves objects for this host.
    if !object.starts_with(b"\x7fELF\x02\x01") {
        return None;
    }
    let first = usize::try_from(number::<8>(object, 0x28)?).ok()?;
    Some((first, number::<2>(object, 0x3c)? as usize))
}

/// The object, with the names that its reader knows.
pub(crate) fn with_old_names(object: &[u8]) -> Cow<'_, [u8]> {
    match renamed(object) {
        Some(renamed) => Cow::Owned(renamed),
        None => Cow::Borrowed(object),
    }
}

/// `None`: nothing is to be renamed.
fn renamed(object: &[u8]) -> Option<Vec<u8>> {
    let (sections, count) = sections(object)?;
    let header = |nth: usize| sections.checked_add(nth.checked_mul(SECTION_HEADER)?);
    let table = header(number::<2>(object, 0x3e)? as usize)?;
    let names = {
        let begin = usize::try_from(number::<8>(object, table.checked_add(0x18)?)?).ok()?;
        let len = usize::try_from(number::<8>(object, table.checked_add(0x20)?)?).ok()?;
        object.get(begin..begin.checked_add(len)?)?
    };
    let name_of = |at: usize| {
        let name = names.get(number::<4>(object, at)? as usize..)?;
        name.split(|&byte| byte == 0).next()
    };
    let headers = (0..count).filter_map(header);
    let is_new = |at: &usize| name_of(*at).is_some_and(|name| NEW_NAMES.contains(&name));
    let new: Vec<usize> = headers.filter(is_new).collect();
    if new.is_empty() {
        return None;
    }
    let mut made = object.to_vec();
    let begin = made.len() as u64;
    made.extend_from_slice(names);
    made.extend_from_slice(OLD_NAME);
    let len = made.len() as u64 - begin;
    let old_name = u32::try_from(names.len()).ok()?;
    for at in new {
        made.get_mut(at..at + 4)?
            .copy_from_slice(&old_name.to_le_bytes());
    }
    made.get_mut(table + 0x18..table + 0x20)?
        .copy_from_slice(&begin.to_le_bytes());
    made.get_mut(table + 0x20..table + 0x28)?
        .copy_from_slice(&len.to_le_bytes());
    Some(made)
}

/// A number of `BYTES` bytes.
fn number<const BYTES: usize>(object: &[u8], at: usize) -> Option<u64> {
    let mut wide = [0; 8];
    let bytes = object.get(at..at.checked_add(BYTES)?)?;
    wide.get_mut(..BYTES)?.copy_from_slice(bytes);
    Some(u64::from_le_bytes(wide))
}

/// `SHT_NOBITS`
const NOT_IN_THE_FILE: u64 = 8;
/// Bytes of `Elf64_Shdr`: the name's place at 0, the type at 4, where the section begins at 0x18, its length at 0x20.
const SECTION_HEADER: usize = 64;

#[cfg(test)]
mod tests {
    use super::*;

    /// Headers, and a table of names of which section 1 is the one of this place.
    fn object(names: &[u8], name: u32) -> Vec<u8> {
        let mut bytes = b"\x7fELF\x02\x01".to_vec();
        bytes.resize(64, 0);
        bytes[0x28..0x30].copy_from_slice(&64_u64.to_le_bytes());
        bytes[0x3c..0x3e].copy_from_slice(&2_u16.to_le_bytes());
        bytes.resize(64 + 2 * SECTION_HEADER, 0);
        let begin = bytes.len() as u64;
        bytes[64 + 0x18..64 + 0x20].copy_from_slice(&begin.to_le_bytes());
        bytes[64 + 0x20..64 + 0x28].copy_from_slice(&(names.len() as u64).to_le_bytes());
        bytes[128..132].copy_from_slice(&name.to_le_bytes());
        bytes.extend_from_slice(names);
        bytes
    }

    #[test]
    fn a_new_name_is_the_old_one_and_others_stay() {
        for (names, name, is_new) in [
            (&b"\0tc\0"[..], 1, true),
            (b"\0tcx/ingress\0", 1, true),
            (b"\0xdp\0.reltc\0", 9, true),
            (b"\0xdp\0.reltc\0", 5, false),
            (b"\0tc/egress\0", 1, false),
            (b"\0classifier\0", 1, false),
        ] {
            let before = object(names, name);
            let after = with_old_names(&before);
            assert_eq!(matches!(after, Cow::Owned(_)), is_new, "{names:?}");
            if is_new {
                let at = number::<4>(&after, 128).unwrap() as usize;
                let begin = number::<8>(&after, 64 + 0x18).unwrap() as usize;
                let len = number::<8>(&after, 64 + 0x20).unwrap() as usize;
                assert_eq!(&after[begin..begin + names.len()], names);
                assert_eq!(&after[begin + at..begin + len], OLD_NAME);
                // Nobody renames it twice.
                assert!(matches!(with_old_names(&after), Cow::Borrowed(_)));
            }
        }
    }

    #[test]
    fn what_is_not_in_the_file_is_counted() {
        let mut of = object(b"\0.bss\0", 1);
        assert_eq!(absent_bytes(&of), Some(0));
        of[128 + 4] = NOT_IN_THE_FILE as u8;
        of[128 + 0x20..128 + 0x28].copy_from_slice(&(1_u64 << 40).to_le_bytes());
        assert_eq!(absent_bytes(&of), Some(1 << 40));
        of[64 + 4] = NOT_IN_THE_FILE as u8;
        of[64 + 0x20..64 + 0x28].copy_from_slice(&u64::MAX.to_le_bytes());
        assert_eq!(absent_bytes(&of), Some(u64::MAX));
        // No table, and one that is not there.
        of[0x3c] = 0;
        assert_eq!(absent_bytes(&of), None);
        of[0x3c] = 99;
        assert_eq!(absent_bytes(&of), None);
        assert_eq!(absent_bytes(b"socket = 1"), None);
    }

    #[test]
    fn what_makes_no_sense_is_left_alone() {
        let whole = object(b"\0tc\0", 1);
        for len in 0..whole.len() {
            assert!(matches!(with_old_names(&whole[..len]), Cow::Borrowed(_)));
        }
        for at in 0..whole.len() {
            for byte in [0, 1, 0x7f, 0xff] {
                let mut lie = whole.clone();
                lie[at] = byte;
                let _ = (with_old_names(&lie), absent_bytes(&lie));
            }
        }
    }
}
