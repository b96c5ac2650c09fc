//! The server name in the first message of a TLS client (RFC 8446, 4.1.2; RFC 6066, 3).

use crate::name::Name;

/// What the beginning of a stream says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Hello {
    /// More of it must be seen.
    More,
    /// It is not TLS, or no server is named.
    Unnamed,
    /// This server is meant.
    Named(Name),
    /// It begins as TLS and is none, names no name or several, or is longer than any client's.
    Wrong,
}

/// No client's first message is longer.
pub const MOST_BYTES: usize = 16_384;

impl Hello {
    /// Reads the bytes that a client has sent so far. What it says once, it says with more bytes, too.
    #[must_use]
    pub fn read(stream: &[u8]) -> Self {
        let mut message = Vec::new();
        let mut rest = stream;
        loop {
            // A message may be cut into several records (RFC 8446, 5.1).
            let is_first = message.is_empty();
            let odd = || if is_first { Self::Unnamed } else { Self::Wrong };
            match rest {
                [] => return Self::More,
                [HANDSHAKE] => return Self::More,
                [HANDSHAKE, 3, ..] => {}
                // Other versions, and records before the first message, which some servers pass over.
                [20..=24, ..] => return Self::Wrong,
                _ => return odd(),
            }
            let Some((head, body)) = rest.split_first_chunk::<5>() else {
                return Self::More;
            };
            let length = usize::from(u16::from_be_bytes([head[3], head[4]]));
            if length == 0 || length > MOST_BYTES {
                return Self::Wrong;
            }
            message.extend_from_slice(&body[..length.min(body.len())]);
            if let Some(found) = Self::of_message(&message) {
                return found;
            }
            match body.get(length..) {
                Some(next) => rest = next,
                None => return Self::More,
            }
        }
    }

    /// `None`: the message is not whole.
    fn of_message(message: &[u8]) -> Option<Self> {
        let (head, body) = match message {
            [] => return None,
            [CLIENT_HELLO, ..] => message.split_first_chunk::<4>()?,
            _ => return Some(Self::Wrong),
        };
        let length = usize::from(head[1]) << 16 | usize::from(head[2]) << 8 | usize::from(head[3]);
        if length > MOST_BYTES {
            return Some(Self::Wrong);
        }
        let body = body.get(..length)?;
        Some(Self::of_body(body).unwrap_or(Self::Wrong))
    }

    /// `None`: it does not follow its own lengths, or names what is no name.
    fn of_body(body: &[u8]) -> Option<Self> {
        // The version and a random number.
        let (_, rest) = body.split_at_checked(2 + 32)?;
        let (_session, rest) = short(rest)?;
        let (_ciphers, rest) = long(rest)?;
        let (_compressions, rest) = short(rest)?;
        if rest.is_empty() {
            return Some(Self::Unnamed);
        }
        let (mut extensions, rest) = long(rest)?;
        if !rest.is_empty() {
            return None;
        }
        let mut found = Self::Unnamed;
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
            if found != Self::Unnamed {
                return None;
            }
            found = Self::Named(Name::new(std::str::from_utf8(name).ok()?).ok()?);
        }
        Some(found)
    }
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
const SERVER_NAME: [u8; 2] = [0, 0];
const HOST_NAME: u8 = 0;

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// A client's first message, in records of at most so many bytes.
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

    #[test]
    fn the_name_is_found_in_whatever_parts_the_message_comes() {
        let expected = Hello::Named(Name::new("a.example.org").unwrap());
        for record in [1, 3, 40, 9000] {
            let stream = hello(&["A.Example.org"], record);
            assert_eq!(Hello::read(&stream), expected, "records of {record}");
            for length in 0..stream.len() {
                assert_eq!(Hello::read(&stream[..length]), Hello::More, "{length}");
            }
            let more = [&stream[..], b"\x17\x03\x03"].concat();
            assert_eq!(Hello::read(&more), expected);
        }
    }

    #[test]
    fn what_is_no_hello_has_no_name_and_what_pretends_is_wrong() {
        for text in [&b"SSH-2.0-x"[..], b"GET / HTTP/1.1"] {
            assert_eq!(Hello::read(text), Hello::Unnamed);
        }
        for text in [
            &b"\x16\x04\x01"[..],
            b"\x15\x03\x01\x00\x02\x01\x5a",
            b"\x14",
        ] {
            assert_eq!(Hello::read(text), Hello::Wrong);
        }
        assert_eq!(Hello::read(&hello(&[], 9000)), Hello::Unnamed);
        for names in [
            &["a.org", "b.org"][..],
            &["a..org"],
            &["a\0.org"],
            &[""],
            &["10.0.0.1"],
        ] {
            assert_eq!(Hello::read(&hello(names, 9000)), Hello::Wrong, "{names:?}");
        }
        let whole = hello(&["a.org"], 9000);
        // Each length in turn says more than there is.
        for at in [43, 44, 48, 50] {
            let mut bytes = whole.clone();
            bytes[at] = 0xff;
            assert_eq!(Hello::read(&bytes), Hello::Wrong, "{at}");
        }
        let endless = [&[22, 3, 1, 0, 4][..], &[1, 0xff, 0, 0]].concat();
        assert_eq!(Hello::read(&endless), Hello::Wrong);
    }
}
