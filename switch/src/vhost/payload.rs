//! What messages carry: pieces of memory, rings with descriptors.

use vnplug_os::closer::PeerFd;

use super::link::ANNOUNCEMENT;
use super::memory::Described;
use super::message::Message;
use super::spec::MAX_RINGS;

/// The ring of a message that brings a descriptor, or says that it brings none.
pub(super) fn ring_of(message: &mut Message) -> Result<(usize, Option<PeerFd>), String> {
    let number = message.number().ok_or("no number")?;
    let at = (number & 0xff) as usize;
    if at >= MAX_RINGS {
        return Err(format!("there is no ring {at}"));
    }
    match (number & NO_FD != 0, message.fds.len()) {
        (true, 0) => Ok((at, None)),
        (false, 1) => Ok((at, message.only_fd())),
        (_, count) => Err(format!("{count} descriptors")),
    }
}

/// The piece that a message describes, behind a number that says nothing.
pub(super) fn one_piece(message: &Message) -> Option<([u8; 8], Described)> {
    let (head, rest) = message.payload.split_first_chunk::<8>()?;
    let piece: &[u8; DESCRIBED] = rest.try_into().ok()?;
    Some((*head, describe(piece)))
}

/// A piece of memory as a message describes it.
pub(super) fn describe(bytes: &[u8; DESCRIBED]) -> Described {
    let [guest, len, user, offset] = words(bytes);
    Described {
        guest,
        len,
        user,
        offset,
    }
}

/// Numbers of 64 bits.
pub(super) fn words<const BYTES: usize, const WORDS: usize>(bytes: &[u8; BYTES]) -> [u64; WORDS] {
    let (words, _) = bytes.as_chunks::<8>();
    std::array::from_fn(|at| words.get(at).map_or(0, |it| u64::from_le_bytes(*it)))
}

/// What tells switches where a guest is: a reverse ARP request (RFC 903), as QEMU's.
pub(super) fn announcement(mac: [u8; 6]) -> [u8; ANNOUNCEMENT] {
    let mut frame = [0; ANNOUNCEMENT];
    frame[..6].fill(0xff);
    frame[6..12].copy_from_slice(&mac);
    frame[12..22].copy_from_slice(&[0x80, 0x35, 0, 1, 8, 0, 6, 4, 0, 3]);
    frame[22..28].copy_from_slice(&mac);
    frame[32..38].copy_from_slice(&mac);
    frame
}

/// Bytes of a piece of memory in a message.
pub(super) const DESCRIBED: usize = 32;
/// In SET_VRING_KICK and SET_VRING_CALL: there is no descriptor.
const NO_FD: u64 = 1 << 8;
