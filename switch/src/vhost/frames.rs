//! Frames out of a guest's rings and into them: chains of descriptors, a virtio-net header before each
//! frame (virtio 1.2, 5.1.6). Each byte is copied once, each way; that of a long frame's rest once from guest
//! to guest (`tail.rs`).

use std::sync::Arc;

use vnplug_ring::offload::{HEADER, Offload, SHORT_HEADER, flags};

use super::acks::Expansion;
use super::memory::{Memory, Piece};
use super::ring::{Broken, Part, Ring};
use super::tail::{BEGIN, Tail, Tails};
use crate::batch::{Batch, MAX_SUPER};
use crate::exits::Out;
use crate::forward::Fault;

/// Empty between two frames.
#[derive(Default)]
pub(super) struct Scratch {
    pub(super) parts: Vec<Part>,
    /// Heads of chains, and the bytes that fit there.
    chains: Vec<(u16, u64)>,
}

/// What became of a frame for a guest.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Put {
    Done,
    /// No buffers are there.
    Full,
    /// Some are, of this number of bytes in all, and the frame is longer.
    Short(u64),
    /// The guest's buffers make no sense, or are too small.
    Never,
}

/// Takes at most `most` frames that the guest sent, of `budget` descriptors or a few more. Whether there may
/// be more.
///
/// # Errors
/// [`Broken`] if the ring makes no sense.
pub(super) fn take(
    ring: &mut Ring,
    parts: &mut Vec<Part>,
    header_len: usize,
    batch: &mut Batch,
    most: usize,
    budget: &mut usize,
    mut acks: Option<&mut Expansion>,
) -> Result<bool, Broken> {
    let end = batch.len() + most;
    let mut left = most;
    while left > 0 && *budget > 0 {
        let there = usize::from(ring.available()?);
        if there == 0 {
            return Ok(false);
        }
        let mut group = [Chain::default(); GROUP];
        let group = &mut group[..there.min(left).min(GROUP)];
        parts.clear();
        // Their bytes are on the way while the descriptors of the next ones are read.
        for (chain, ahead) in group.iter_mut().zip(0..) {
            let begin = parts.len();
            chain.head = ring.head(ahead)?;
            let is_sound = ring.chain(chain.head, parts).is_ok();
            chain.end = parts.len() as u32;
            let [first, rest @ ..] = &parts[begin..] else {
                continue;
            };
            let is_guests = |part: &Part| !part.is_for_guest;
            chain.is_sound = is_sound && is_guests(first) && rest.iter().all(is_guests);
            ring.memory().prefetch(first.at);
        }
        let mut begin = 0;
        for chain in group.iter() {
            let of_it = &parts[begin..chain.end as usize];
            let memory = ring.memory();
            if !push(
                memory,
                of_it,
                chain.is_sound,
                header_len,
                batch,
                acks.as_deref_mut(),
            ) {
                // There is no room.
                return Ok(true);
            }
            ring.give_back(chain.head, 0);
            begin = chain.end as usize;
        }
        // With the ACKs that were added.
        left = end.saturating_sub(batch.len());
        *budget = budget.saturating_sub(parts.len());
    }
    Ok(true)
}

/// A chain of a group.
#[derive(Clone, Copy, Default)]
struct Chain {
    head: u16,
    /// It has parts, and the guest wrote all of them.
    is_sound: bool,
    /// Where its parts end.
    end: u32,
}

/// Copies a frame out of the guest, header and bytes each once, or notes why that cannot be. False: there
/// is no room.
#[inline]
fn push(
    memory: &Arc<Memory>,
    parts: &[Part],
    is_sound: bool,
    header_len: usize,
    batch: &mut Batch,
    acks: Option<&mut Expansion>,
) -> bool {
    let total: u64 = match parts {
        [only] => only.len.into(),
        _ => parts.iter().map(|part| u64::from(part.len)).sum(),
    };
    let len = total.saturating_sub(header_len as u64);
    if !is_sound || len == 0 {
        return batch.push_fault(Fault::Chain);
    }
    if len > MAX_SUPER as u64 {
        return batch.push_fault(Fault::Long);
    }
    let len = len as usize;
    if !batch.has_room(len) {
        return false;
    }
    match acks {
        None => push_alone(memory, parts, header_len, len, batch),
        Some(acks) if len <= BEGIN => push_with_acks(memory, parts, header_len, len, batch, acks),
        Some(acks) => {
            let is_there = push_alone(memory, parts, header_len, len, batch);
            if is_there {
                acks.saw(&batch.get(batch.len() - 1));
            }
            is_there
        }
    }
}

/// As [`push`], of a frame that is not too long and stands for itself alone.
#[inline]
fn push_alone(
    memory: &Arc<Memory>,
    parts: &[Part],
    header_len: usize,
    len: usize,
    batch: &mut Batch,
) -> bool {
    if let [only] = parts
        && !batch.would_leave(len)
        && let Some(piece) = memory.piece(only.at, header_len + len)
    {
        return push_plain(piece, header_len, len, batch);
    }
    let mut header = [0; SHORT_HEADER];
    if !gather(memory, parts, 0, &mut header) {
        return batch.push_fault(Fault::Chain);
    }
    let rest = |tails: &mut Tails| tails.find(memory, parts, header_len + BEGIN);
    batch.push_leaving(len, offload(&header), rest, |place| {
        gather(memory, parts, header_len, place)
    }) || batch.push_fault(Fault::Chain)
}

/// As [`push`], of a frame in one piece of memory, all of which is copied.
#[inline]
fn push_plain(piece: Piece<'_>, header_len: usize, len: usize, batch: &mut Batch) -> bool {
    let mut header = [0; SHORT_HEADER];
    piece.read(0, &mut header);
    batch.push(len, offload(&header), |place| {
        piece.read(header_len, place);
        true
    })
}

/// What a guest says that is left to do with a frame.
#[inline]
fn offload(header: &[u8; SHORT_HEADER]) -> Offload {
    let mut offload = Offload::from_header(header);
    // What it says of sums that it has found right is its own affair.
    offload.flags &= flags::NEEDS_CSUM;
    offload
}

/// Copies a short frame out of the guest, after the ACKs that it stands for.
fn push_with_acks(
    memory: &Arc<Memory>,
    parts: &[Part],
    header_len: usize,
    len: usize,
    batch: &mut Batch,
    acks: &mut Expansion,
) -> bool {
    // Once: what is decided by is what leaves.
    let (mut header, mut frame) = ([0; SHORT_HEADER], [0; BEGIN]);
    let frame = &mut frame[..len];
    let piece = match parts {
        [only] => memory.piece(only.at, header_len + len),
        _ => None,
    };
    if let Some(piece) = piece {
        piece.read(0, &mut header);
        piece.read(header_len, frame);
    } else if !gather(memory, parts, 0, &mut header) || !gather(memory, parts, header_len, frame) {
        return batch.push_fault(Fault::Chain);
    }
    let offload = offload(&header);
    acks.expand(frame, &offload, batch);
    // If there is no room, it comes in the next turn, and stands for itself alone.
    batch.push(len, offload, |place| {
        place.copy_from_slice(frame);
        true
    })
}

/// Copies bytes out of a chain, without its first `skip`.
#[inline]
fn gather(memory: &Memory, parts: &[Part], skip: usize, into: &mut [u8]) -> bool {
    let (mut skip, mut done) = (skip as u64, 0);
    for part in parts {
        let len = u64::from(part.len);
        if skip >= len {
            skip -= len;
            continue;
        }
        let now = (len - skip).min((into.len() - done) as u64) as usize;
        let Some(at) = part.at.checked_add(skip) else {
            return false;
        };
        if !memory.read(at, &mut into[done..done + now]) {
            return false;
        }
        (skip, done) = (0, done + now);
        if done == into.len() {
            return true;
        }
    }
    false
}

/// The header of a frame for a guest.
pub(super) struct Head {
    pub(super) bytes: [u8; HEADER],
    pub(super) len: usize,
    /// A frame may take several chains, and the header says how many.
    pub(super) is_mergeable: bool,
}

/// Copies a frame into the guest's buffers.
///
/// # Errors
/// [`Broken`] if the ring makes no sense.
#[inline]
pub(super) fn put(
    ring: &mut Ring,
    scratch: &mut Scratch,
    header: Head,
    out: &Out<'_>,
) -> Result<Put, Broken> {
    scratch.parts.clear();
    scratch.chains.clear();
    let there = ring.available()?;
    ring.prefetch(PREFETCHED);
    ring.prefetch_buffer(NEAR);
    if there > 0 && put_plain(ring, &header, out)? {
        return Ok(Put::Done);
    }
    put_over(ring, scratch, header, out, there)
}

/// Copies a frame into the next buffer, if that is one descriptor in one piece of memory and has room for all of
/// it; false, and nothing is done, if it has not. NB: what is read of the ring for that is not used after it.
#[inline]
fn put_plain(ring: &mut Ring, header: &Head, out: &Out<'_>) -> Result<bool, Broken> {
    let head = ring.head(0)?;
    let need = header.len + out.len();
    let Some(part) = ring.only(head) else {
        return Ok(false);
    };
    if !part.is_for_guest || (part.len as usize) < need {
        return Ok(false);
    }
    let memory = ring.memory();
    let Some(piece) = memory.piece(part.at, need) else {
        return Ok(false);
    };
    // It takes one chain, which is what the header says.
    piece.write(0, &header.bytes[..header.len]);
    piece.write(header.len, out.head);
    let mut done = header.len + out.head.len();
    if !out.body.is_empty() {
        piece.write(done, out.body);
        done += out.body.len();
    }
    if let Some(tail) = &out.tail {
        let (theirs, all) = tail.pieces();
        for found in all {
            piece.copy(done, theirs, found);
            done += found.len as usize;
        }
    }
    memory.wrote(part.at, need as u64);
    ring.give_back(head, need as u32);
    Ok(true)
}

/// Copies a frame into one buffer or several; `there` chains are there.
#[inline(never)]
fn put_over(
    ring: &mut Ring,
    scratch: &mut Scratch,
    mut header: Head,
    out: &Out<'_>,
    mut there: u16,
) -> Result<Put, Broken> {
    let Scratch { parts, chains } = scratch;
    let need = (header.len + out.len()) as u64;
    let known = |ring: &Ring| ring.room().filter(|room| *room < need);
    if known(ring).is_some() {
        there = ring.refresh()?;
        // NB: not walked through again before the guest adds some: it may be a thousand descriptors, for each frame.
        if let Some(room) = known(ring) {
            return Ok(Put::Short(room));
        }
    }
    let mut room = 0;
    while room < need {
        let count = chains.len() as u16;
        if count >= there {
            there = ring.refresh()?;
            if count >= there {
                // More chains than a ring has entries the guest will never have. How many it will have is
                // not known else: a chain may take several of them.
                return Ok(match there {
                    0 => Put::Full,
                    _ if there < ring.size() => {
                        ring.note_room(room);
                        Put::Short(room)
                    }
                    _ => refuse(ring, chains),
                });
            }
        }
        let first = ring.head(count)?;
        let before = parts.len();
        let is_sound = ring.chain(first, parts).is_ok()
            && parts[before..].iter().all(|part| part.is_for_guest);
        let fits: u64 = parts[before..].iter().map(|it| u64::from(it.len)).sum();
        chains.push((first, fits));
        room += fits;
        let is_enough = header.is_mergeable || room >= need;
        if !is_sound || fits == 0 || !is_enough || parts.len() > MAX_OF_FRAME {
            return Ok(refuse(ring, chains));
        }
    }
    if header.len == HEADER {
        header.bytes[HEADER - 2..].copy_from_slice(&(chains.len() as u16).to_le_bytes());
    }
    let mut scatter = Scatter {
        memory: ring.memory(),
        parts,
        written: 0,
    };
    let pieces = [&header.bytes[..header.len], out.head, out.body];
    let mut is_there = pieces.into_iter().all(|bytes| scatter.write(bytes));
    if let Some(tail) = out.tail.filter(|_| is_there) {
        is_there = scatter.copy(&tail);
    }
    if !is_there {
        return Ok(refuse(ring, chains));
    }
    let mut left = need;
    for &(first, fits) in chains.iter() {
        let len = fits.min(left);
        ring.give_back(first, len as u32);
        left -= len;
    }
    Ok(Put::Done)
}

/// Gives chains back that make no sense, and those before them.
#[cold]
fn refuse(ring: &mut Ring, chains: &[(u16, u64)]) -> Put {
    for &(first, _) in chains {
        ring.give_back(first, 0);
    }
    Put::Never
}

/// Writes into the parts of chains, one piece after the other.
struct Scatter<'a> {
    memory: &'a Memory,
    parts: &'a [Part],
    /// Bytes of the first part that are written.
    written: u32,
}

impl Scatter<'_> {
    /// Where to write next, and how many bytes fit there at most.
    #[inline]
    fn place(&self) -> Option<(u64, usize)> {
        let part = self.parts.first()?;
        let at = part.at.checked_add(u64::from(self.written))?;
        Some((at, (part.len - self.written) as usize))
    }

    /// `len` bytes were written there.
    #[inline]
    fn went(&mut self, len: usize) {
        self.written += len as u32;
        if self.parts.first().is_some_and(|it| it.len == self.written) {
            (self.parts, self.written) = (&self.parts[1..], 0);
        }
    }

    /// Writes what is still with who sent it.
    #[inline]
    fn copy(&mut self, tail: &Tail<'_>) -> bool {
        let (memory, pieces) = tail.pieces();
        for piece in pieces {
            let (mut done, len) = (0, piece.len as usize);
            while done < len {
                let Some((at, room)) = self.place() else {
                    return false;
                };
                let now = room.min(len - done);
                if !self.memory.copy(at, now, (memory, piece, done)) {
                    return false;
                }
                self.went(now);
                done += now;
            }
        }
        true
    }

    #[inline]
    fn write(&mut self, mut bytes: &[u8]) -> bool {
        while !bytes.is_empty() {
            let Some((at, room)) = self.place() else {
                return false;
            };
            let (now, rest) = bytes.split_at(room.min(bytes.len()));
            if !self.memory.write(at, now) {
                return false;
            }
            self.went(now.len());
            bytes = rest;
        }
        true
    }
}

/// How many buffers ahead a descriptor is fetched, and a buffer.
const PREFETCHED: u16 = 8;
const NEAR: u16 = 4;
/// Descriptors that are read for one guest in one turn, each way, or a few more.
pub(super) const MAX_PARTS: usize = 4096;
/// Those of one frame for a guest, or a few more.
const MAX_OF_FRAME: usize = 1024;
/// Chains whose bytes are on the way together.
const GROUP: usize = 8;

#[cfg(test)]
mod tests;
