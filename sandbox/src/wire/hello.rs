//! The server name in the first message of a TLS client (RFC 8446, 4.1.2; RFC 6066, 3), and in every other such message that
//! a server may want after it (4.1.4): what follows is read until the server has taken one.

use crate::name::Name;

/// What a client's stream says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Hello {
    /// It is not TLS.
    Other,
    /// A message that begins a connection, and names no server.
    Unnamed,
    /// A message that begins a connection with this server.
    Named(Name),
    /// It begins as TLS and is none, names several servers or what is no name, or is longer than any client's.
    Wrong,
    /// The client goes on as its server has chosen; whom it means was said before.
    Over,
}

/// No client's first message is longer.
pub const MOST_BYTES: usize = 16_384;

/// Reads what a client sends, in whatever pieces it comes.
#[derive(Debug, Default)]
pub struct Client {
    records: Records,
    /// The message that is not whole yet.
    message: Vec<u8>,
    /// What was read for it, with the heads of its records.
    taken: usize,
    /// A first message was read.
    greeted: bool,
}

/// Reads the beginning of what a server sends, in order.
#[derive(Debug, Default)]
pub struct Server {
    records: Records,
    /// The beginning of the message that is not whole yet.
    message: Vec<u8>,
    /// How much of that message is passed over.
    left: usize,
    /// Nothing more is to be learnt of it, or it cannot be understood.
    lost: bool,
}

/// Where a stream stands in its records (RFC 8446, 5.1).
#[derive(Debug, Default)]
struct Records {
    head: Vec<u8>,
    kind: u8,
    left: usize,
}

/// Why a stream does not go on as records.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Odd {
    /// There is no such kind.
    Kind,
    Record,
}

impl Client {
    /// Reads on, to the end of the stream or to the next message that says something. What is left is to be read again.
    #[must_use]
    pub fn read(&mut self, stream: &mut &[u8]) -> Option<Hello> {
        loop {
            let before = stream.len();
            let kind = match self.records.begin(stream) {
                Ok(kind) => kind,
                Err(Odd::Kind) if !self.greeted && self.message.is_empty() => {
                    return Some(Hello::Other);
                }
                Err(_) => return Some(Hello::Wrong),
            };
            match kind {
                // Records before the first message some servers pass over; inside a message there are no others.
                Some(kind) if kind != HANDSHAKE => {
                    if !self.greeted || !self.message.is_empty() {
                        return Some(Hello::Wrong);
                    }
                    // Early data, which a server that wants another first message passes over (RFC 8446, 4.2.10).
                    self.records.take(stream, usize::MAX);
                    self.taken = 0;
                    continue;
                }
                Some(_) => {
                    let wanted = match self.message.len() {
                        known @ 0..MESSAGE_HEAD => MESSAGE_HEAD - known,
                        known => MESSAGE_HEAD + length_of(&self.message) - known,
                    };
                    self.message
                        .extend_from_slice(self.records.take(stream, wanted));
                }
                None => {}
            }
            self.taken += before - stream.len();
            match self.message.first() {
                None | Some(&CLIENT_HELLO) => {}
                Some(_) if self.greeted => return Some(Hello::Over),
                Some(_) => return Some(Hello::Wrong),
            }
            if self.taken > MOST_BYTES + MOST_HEADS {
                return Some(Hello::Wrong);
            }
            if self.message.len() >= MESSAGE_HEAD {
                let length = length_of(&self.message);
                if length > MOST_BYTES {
                    return Some(Hello::Wrong);
                }
                if self.message.len() == MESSAGE_HEAD + length {
                    let found = of_body(&self.message[MESSAGE_HEAD..]);
                    self.message.clear();
                    (self.taken, self.greeted) = (0, true);
                    return Some(found.unwrap_or(Hello::Wrong));
                }
            }
            kind?;
        }
    }

    /// Whether a first message was read.
    #[must_use]
    pub fn has_greeted(&self) -> bool {
        self.greeted
    }

    /// Bytes that it keeps.
    pub(super) fn kept(&self) -> usize {
        self.records.head.capacity() + self.message.capacity()
    }
}

impl Server {
    /// Reads on. True once, as soon as the server has taken what the client said, and does not want it said anew.
    #[must_use]
    pub fn read(&mut self, mut stream: &[u8]) -> bool {
        while !self.lost {
            match self.records.begin(&mut stream) {
                Ok(None) => return false,
                Ok(Some(HANDSHAKE)) if self.message.len() < SERVER_HEAD => {
                    let wanted = SERVER_HEAD - self.message.len();
                    self.message
                        .extend_from_slice(self.records.take(&mut stream, wanted));
                    self.lost = self.message[0] != SERVER_HELLO;
                    if self.message.len() < SERVER_HEAD {
                        continue;
                    }
                    if !self.lost && self.message[SERVER_HEAD - RETRY.len()..] != RETRY {
                        self.lost = true;
                        return true;
                    }
                    match (MESSAGE_HEAD + length_of(&self.message)).checked_sub(SERVER_HEAD) {
                        Some(0) => self.message.clear(),
                        Some(left) => self.left = left,
                        None => self.lost = true,
                    }
                }
                Ok(Some(HANDSHAKE)) => {
                    self.left -= self.records.take(&mut stream, self.left).len();
                    if self.left == 0 {
                        self.message.clear();
                    }
                }
                // A warning, or what is sent for the sake of others between.
                Ok(Some(_)) => drop(self.records.take(&mut stream, usize::MAX)),
                Err(_) => self.lost = true,
            }
        }
        false
    }

    /// Something that it sent was not read.
    pub(super) fn lose(&mut self) {
        self.lost = true;
    }

    /// Whether nothing more is to be learnt of it.
    pub(super) fn is_lost(&self) -> bool {
        self.lost
    }

    /// Bytes that it keeps.
    pub(super) fn kept(&self) -> usize {
        self.records.head.capacity() + self.message.capacity()
    }
}

impl Records {
    /// Reads to the content of a record: of which kind it is. `None`: more of the stream must be seen.
    fn begin(&mut self, stream: &mut &[u8]) -> Result<Option<u8>, Odd> {
        while self.left == 0 {
            let Some((byte, rest)) = stream.split_first() else {
                return Ok(None);
            };
            *stream = rest;
            self.head.push(*byte);
            match *self.head.as_slice() {
                [20..=24] | [_, 3] | [_, _, _] | [_, _, _, _] => {}
                [_] => return Err(Odd::Kind),
                [kind, _, _, high, low] => {
                    let length = usize::from(u16::from_be_bytes([high, low]));
                    let is_right = match kind {
                        HANDSHAKE => (1..=MOST_BYTES).contains(&length),
                        _ => length <= MOST_BYTES + MOST_SEALED,
                    };
                    if !is_right {
                        return Err(Odd::Record);
                    }
                    (self.kind, self.left) = (kind, length);
                    self.head.clear();
                    if length == 0 {
                        return Ok(Some(kind));
                    }
                }
                _ => return Err(Odd::Record),
            }
        }
        Ok((!stream.is_empty()).then_some(self.kind))
    }

    /// At most `most` bytes of the record's content.
    fn take<'a>(&mut self, stream: &mut &'a [u8], most: usize) -> &'a [u8] {
        let (content, rest) = stream.split_at(self.left.min(most).min(stream.len()));
        *stream = rest;
        self.left -= content.len();
        content
    }
}

/// The length that a message's head says.
fn length_of(message: &[u8]) -> usize {
    usize::from(message[1]) << 16 | usize::from(message[2]) << 8 | usize::from(message[3])
}

/// The message that a client's stream without records begins with, as in QUIC, if it is whole; and its length.
pub fn whole(stream: &[u8]) -> Option<(Hello, usize)> {
    match stream.first()? {
        &CLIENT_HELLO => {}
        _ => return Some((Hello::Wrong, 1)),
    }
    let (head, rest) = stream.split_at_checked(MESSAGE_HEAD)?;
    let length = length_of(head);
    if length > MOST_BYTES {
        return Some((Hello::Wrong, MESSAGE_HEAD));
    }
    let found = of_body(rest.get(..length)?);
    Some((found.unwrap_or(Hello::Wrong), MESSAGE_HEAD + length))
}

/// `None`: it does not follow its own lengths, or names what is no name.
fn of_body(body: &[u8]) -> Option<Hello> {
    // The version and a random number.
    let (_, rest) = body.split_at_checked(2 + 32)?;
    let (_session, rest) = short(rest)?;
    let (_ciphers, rest) = long(rest)?;
    let (_compressions, rest) = short(rest)?;
    if rest.is_empty() {
        return Some(Hello::Unnamed);
    }
    let (mut extensions, rest) = long(rest)?;
    if !rest.is_empty() {
        return None;
    }
    let mut found = Hello::Unnamed;
    while !extensions.is_empty() {
        let (kind, rest) = extensions.split_first_chunk::<2>()?;
        let (content, rest) = long(rest)?;
        extensions = rest;
        if *kind != SERVER_NAME {
            continue;
        }
        let (list, rest) = long(content)?;
        let (kind, name) = list.split_first()?;
        let (name, others) = long(name)?;
        // There is one name, and one kind of them (RFC 6066, 3).
        if !rest.is_empty() || *kind != HOST_NAME || !others.is_empty() {
            return None;
        }
        if found != Hello::Unnamed {
            return None;
        }
        found = Hello::Named(Name::new(std::str::from_utf8(name).ok()?).ok()?);
    }
    Some(found)
}

/// What a length of one byte says, and the rest.
fn short(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let (length, rest) = bytes.split_first()?;
    rest.split_at_checked(usize::from(*length))
}

/// What a length of two bytes says, and the rest.
fn long(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let (length, rest) = bytes.split_first_chunk::<2>()?;
    rest.split_at_checked(usize::from(u16::from_be_bytes(*length)))
}

const HANDSHAKE: u8 = 22;
const CLIENT_HELLO: u8 = 1;
const SERVER_HELLO: u8 = 2;
const SERVER_NAME: [u8; 2] = [0, 0];
const HOST_NAME: u8 = 0;
/// What stands in the place of a random number if the server wants another first message (RFC 8446, 4.1.3).
const RETRY: [u8; 32] = [
    0xcf, 0x21, 0xad, 0x74, 0xe5, 0x9a, 0x61, 0x11, 0xbe, 0x1d, 0x8c, 0x02, 0x1e, 0x65, 0xb8, 0x91,
    0xc2, 0xa2, 0x11, 0x16, 0x7a, 0xbb, 0x8c, 0x5e, 0x07, 0x9e, 0x09, 0xe2, 0xc8, 0xa8, 0x33, 0x9c,
];
/// Kind and length of a message.
const MESSAGE_HEAD: usize = 4;
/// A server's message to the end of its random number.
const SERVER_HEAD: usize = MESSAGE_HEAD + 2 + RETRY.len();
/// Heads of the records that a message comes in.
const MOST_HEADS: usize = 1024;
/// How much longer a record is that is encrypted (RFC 5246, 6.2.3).
const MOST_SEALED: usize = 2048;

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// A client's first message, in records of at most `record` bytes.
    pub(in crate::wire) fn hello(names: &[&str], record: usize) -> Vec<u8> {
        let long = |bytes: &[u8]| [&(bytes.len() as u16).to_be_bytes()[..], bytes].concat();
        let mut extensions = vec![0x00, 0x2b, 0, 3, 2, 3, 4];
        for name in names {
            let list = long(&[&[0][..], &long(name.as_bytes())].concat());
            extensions.extend([0, 0]);
            extensions.extend(long(&list));
        }
        let mut body = vec![3, 3];
        body.extend([7; 32]);
        body.extend([0]);
        body.extend(long(&[0x13, 1]));
        body.extend([1, 0]);
        body.extend(long(&extensions));
        let mut message = vec![1, 0];
        message.extend((body.len() as u16).to_be_bytes());
        message.extend(body);
        let records = message.chunks(record);
        records
            .flat_map(|part| [&[22, 3, 1][..], &long(part)].concat())
            .collect()
    }

    /// A server's message with this random number, in records of at most `record` bytes.
    pub(in crate::wire) fn answer(random: [u8; 32], record: usize) -> Vec<u8> {
        let body = [&[3, 3][..], &random, &[0, 0x13, 1, 0, 0, 0]].concat();
        let message = [&[2, 0, 0, body.len() as u8][..], &body].concat();
        let records = message.chunks(record);
        records
            .flat_map(|part| [&[22, 3, 3, 0, part.len() as u8][..], part].concat())
            .collect()
    }

    pub(in crate::wire) const ANOTHER: [u8; 32] = RETRY;

    /// What a client's stream says first.
    fn first(mut stream: &[u8]) -> Option<Hello> {
        Client::default().read(&mut stream)
    }

    /// All that it says.
    fn all(mut stream: &[u8]) -> Vec<Hello> {
        let mut client = Client::default();
        std::iter::from_fn(|| client.read(&mut stream)).collect()
    }

    fn named(text: &str) -> Hello {
        Hello::Named(Name::new(text).unwrap())
    }

    #[test]
    fn the_name_is_found_in_whatever_parts_the_message_comes() {
        for record in [1, 3, 40, 9000] {
            let stream = hello(&["A.Example.org"], record);
            assert_eq!(
                first(&stream),
                Some(named("a.example.org")),
                "records of {record}"
            );
            for length in 0..stream.len() {
                assert_eq!(first(&stream[..length]), None, "{length}");
                let mut client = Client::default();
                let mut found = |mut part: &[u8]| client.read(&mut part);
                assert_eq!(found(&stream[..length]), None);
                assert_eq!(found(&stream[length..]), Some(named("a.example.org")));
            }
            let more = [&stream[..], b"\x17\x03\x03"].concat();
            assert_eq!(all(&more), [named("a.example.org")]);
        }
    }

    #[test]
    fn a_message_that_the_server_wanted_anew_is_read_and_what_follows_an_accepted_one_is_not() {
        let two = [hello(&["a.org"], 9000), hello(&["b.org"], 9000)].concat();
        assert_eq!(all(&two), [named("a.org"), named("b.org")]);
        // In one record, and behind what a client sends between them.
        let mut one = two.clone();
        let second = hello(&["a.org"], 9000).len();
        one.drain(second..second + 5);
        let length = (one.len() - 5) as u16;
        one[3..5].copy_from_slice(&length.to_be_bytes());
        assert_eq!(all(&one), [named("a.org"), named("b.org")]);
        let (early, cipher) = ([23, 3, 3, 0, 3, 1, 1, 1], [20, 3, 3, 0, 1, 1]);
        let between = [&two[..second], &cipher, &early, &two[second..]].concat();
        assert_eq!(all(&between), [named("a.org"), named("b.org")]);
        // Keys of TLS 1.2; no record in the middle of a message, and no empty one; nothing else than records.
        for (after, expected) in [
            (&[22, 3, 3, 0, 4, 16, 0, 0, 0][..], Hello::Over),
            (&[22, 3, 3, 0, 1, 1, 23, 3, 3, 0, 1, 0], Hello::Wrong),
            (&[22, 3, 3, 0, 1, 1, 23, 3, 3, 0, 0], Hello::Wrong),
            (b"GET", Hello::Wrong),
        ] {
            let mut client = Client::default();
            let stream = [&two[..second], after].concat();
            let mut rest = &stream[..];
            assert_eq!(client.read(&mut rest), Some(named("a.org")));
            assert_eq!(client.read(&mut rest), Some(expected), "{after:?}");
        }
    }

    #[test]
    fn early_data_is_as_long_as_it_likes_in_whatever_pieces_it_comes() {
        let mut client = Client::default();
        let first = hello(&["a.org"], 9000);
        assert_eq!(client.read(&mut &first[..]), Some(named("a.org")));
        let early = [&[23, 3, 3, 0, 200][..], &[0; 200]].concat();
        for record in 0..10_000 {
            for mut piece in [&early[..4], &early[4..100], &early[100..]] {
                assert_eq!(client.read(&mut piece), None, "{record}");
            }
        }
        assert_eq!(client.read(&mut &first[..]), Some(named("a.org")));
        assert!(
            client.kept() <= first.len() + MOST_HEADS,
            "nothing of it is kept"
        );
    }

    #[test]
    fn a_server_takes_what_was_said_or_wants_it_anew() {
        let warning = [21, 3, 3, 0, 2, 1, 112];
        for record in [1, 3, 9000] {
            let (takes, anew) = (answer([7; 32], record), answer(RETRY, record));
            for (stream, is_taken) in [
                (takes.clone(), true),
                ([&warning[..], &takes].concat(), true),
                (anew.clone(), false),
                ([&anew[..], &takes].concat(), true),
                ([&anew[..], &anew].concat(), false),
                (b"HTTP/1.1 400".to_vec(), false),
                ([&[22, 3, 3, 0, 1, 9][..], &takes].concat(), false),
            ] {
                assert_eq!(Server::default().read(&stream), is_taken, "{stream:?}");
                let mut server = Server::default();
                let by_bytes = stream.chunks(1).any(|byte| server.read(byte));
                assert_eq!(by_bytes, is_taken, "{stream:?}");
            }
        }
    }

    #[test]
    fn what_is_no_hello_has_no_name_and_what_pretends_is_wrong() {
        for text in [&b"SSH-2.0-x"[..], b"GET / HTTP/1.1"] {
            assert_eq!(first(text), Some(Hello::Other));
        }
        for text in [
            &b"\x16\x04\x01"[..],
            b"\x15\x03\x01\x00\x02\x01\x5a",
            b"\x14\x03\x01\x00\x01\x01",
            b"\x16\x03\x01\x00\x00",
            b"\x17\x03\x01\x00\x00",
        ] {
            assert_eq!(first(text), Some(Hello::Wrong), "{text:?}");
        }
        assert_eq!(first(&hello(&[], 9000)), Some(Hello::Unnamed));
        for names in [
            &["a.org", "b.org"][..],
            &["a..org"],
            &["a\0.org"],
            &[""],
            &["10.0.0.1"],
        ] {
            assert_eq!(first(&hello(names, 9000)), Some(Hello::Wrong), "{names:?}");
        }
        let whole = hello(&["a.org"], 9000);
        // Each length in turn says more than there is.
        for at in [43, 44, 48, 50] {
            let mut bytes = whole.clone();
            bytes[at] = 0xff;
            assert_eq!(first(&bytes), Some(Hello::Wrong), "{at}");
        }
        let endless = [&[22, 3, 1, 0, 4][..], &[1, 0xff, 0, 0]].concat();
        assert_eq!(first(&endless), Some(Hello::Wrong));
    }
}
