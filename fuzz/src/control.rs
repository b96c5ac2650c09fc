//! The control stream: what an application, an agent or QEMU writes into a channel.
//!
//! Holds: no panic; the pieces in which bytes come make no difference; a message that was read is
//! written and read again as the same; after garbage, the next message is found.

use vnplug_ring::control::Message;
use vnplug_ring::control::wire::{Framer, HEADER, Header, MAGIC, MAX_REQUEST, Malformed};

use crate::Dice;

/// Checks it with these bytes.
///
/// The first byte says what they are: a stream as it comes, or messages and garbage from which a
/// stream is made (the header's check word is hard to guess).
pub fn check(bytes: &[u8]) {
    let mut dice = Dice(bytes);
    if dice.byte() & 1 == 0 {
        streams(dice.byte(), dice.0);
    } else {
        messages(&mut dice);
    }
}

/// The same stream at once and in pieces, to both kinds of framer.
fn streams(piece: u8, stream: &[u8]) {
    let piece = usize::from(piece).max(1);
    for make in [Framer::strict, Framer::resyncing] {
        let (mut whole, mut pieces) = (make(MAX_REQUEST), make(MAX_REQUEST));
        whole.push(stream);
        let (at_once, end) = read(&mut whole);
        let (mut one_by_one, mut end_of_pieces) = (Vec::new(), None);
        for piece in stream.chunks(piece) {
            pieces.push(piece);
            let (more, end) = read(&mut pieces);
            one_by_one.extend(more);
            if end.is_some() {
                end_of_pieces = end;
                break;
            }
        }
        assert_eq!(at_once, one_by_one);
        assert_eq!(end, end_of_pieces);
        // What may still become a header is skipped later, or with what came along.
        assert!(whole.skipped().abs_diff(pieces.skipped()) < HEADER as u64);
        at_once.iter().for_each(judge);
    }
}

type Frame = (Header, Vec<u8>);

/// All whole messages, and why there are no more.
fn read(framer: &mut Framer) -> (Vec<Frame>, Option<Malformed>) {
    let mut frames = Vec::new();
    loop {
        match framer.next_message() {
            Ok(Some(frame)) => frames.push(frame),
            Ok(None) => return (frames, None),
            Err(malformed) => return (frames, Some(malformed)),
        }
    }
}

fn judge(frame: &Frame) {
    let Ok(message) = Message::from_frame(frame) else {
        return;
    };
    let written = message.encode(frame.0.id, frame.0.app);
    let (again, end) = {
        let mut framer = Framer::strict(written.len());
        framer.push(&written);
        read(&mut framer)
    };
    assert_eq!((again.len(), end), (1, None), "{message:?}");
    assert_eq!((again[0].0.id, again[0].0.app), (frame.0.id, frame.0.app));
    assert_eq!(Message::from_frame(&again[0]).as_ref(), Ok(&message));
}

/// The number of a message. What the corpus was found with, below 200, stays what it was; the rest are later
/// ones, those of back-ends among them.
fn kind(byte: u8) -> u8 {
    match byte {
        0..200 => byte % 40,
        _ => 35 + (byte - 200) % 29,
    }
}

/// Messages with garbage between them: a reader of a byte channel finds every one.
fn messages(dice: &mut Dice<'_>) {
    let (mut stream, mut sent) = (Vec::new(), Vec::new());
    while !dice.is_empty() {
        let garbage = usize::from(dice.byte() % 32);
        let garbage = dice.bytes(garbage).iter();
        // What looks like the beginning of a message may hide the next one.
        stream.extend(garbage.filter(|byte| **byte != MAGIC.to_le_bytes()[0]));
        let len = usize::from(dice.u16()) % 2048;
        let (version, kind) = (dice.byte() % 3, kind(dice.byte()));
        let (id, app) = (dice.u32(), dice.u32());
        let payload = dice.bytes(len).to_vec();
        let header = Header {
            version,
            kind,
            len: payload.len() as u32,
            id,
            app,
        };
        stream.extend(header.encode());
        stream.extend(&payload);
        sent.push((header, payload));
    }
    let mut framer = Framer::resyncing(MAX_REQUEST);
    framer.push(&stream);
    let (found, _) = read(&mut framer);
    assert_eq!(found, sent);
    let skipped = stream.len() - sent.iter().map(|(_, p)| HEADER + p.len()).sum::<usize>();
    assert_eq!(framer.skipped(), skipped as u64);
    found.iter().for_each(judge);
}
