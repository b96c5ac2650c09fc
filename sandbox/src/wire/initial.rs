//! The first packets of a QUIC client (RFC 9000, 17.2.2). They are encrypted with keys that everybody on the way can derive from
//! the connection id that stands before them (RFC 9001, 5.2).
//!
//! Of version 1. Others that are known are not read, and no version 1 either.

use std::fmt;

use ring::aead::{self, Aad, LessSafeKey, Nonce, UnboundKey, quic};
use ring::hkdf;

/// An Initial packet, as it was sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Initial<'a> {
    packet: &'a [u8],
    /// Where its number begins.
    number_at: usize,
    /// The connection id of whom it goes to.
    pub to: &'a [u8],
}

/// A piece of the client's handshake messages, and where in them it stands.
pub type Piece<'a> = (usize, &'a [u8]);

/// It begins as a packet of QUIC and cannot be read on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unreadable;

/// What a client's first packets are encrypted with.
pub struct Keys {
    packet: LessSafeKey,
    iv: [u8; aead::NONCE_LEN],
    head: quic::HeaderProtectionKey,
}

/// The Initial packets of a datagram. There are none in one that is not of QUIC, or of which no server asks.
///
/// # Errors
/// [`Unreadable`]
pub fn initials(mut datagram: &[u8]) -> Result<Vec<Initial<'_>>, Unreadable> {
    let mut found = Vec::new();
    // A packet with a short head is the last.
    while datagram.first().is_some_and(|first| first & LONG != 0) {
        let Some((version, _)) = datagram.get(1..).and_then(<[u8]>::split_first_chunk) else {
            // It is too short for any packet of QUIC.
            return Ok(found);
        };
        match u32::from_be_bytes(*version) {
            VERSION_1 => {}
            VERSION_2 | FIRST_DRAFT..=LAST_DRAFT => return Err(Unreadable),
            // A server would say which ones it knows.
            _ => return Ok(found),
        }
        let kind = datagram[0] >> 4 & 3;
        let (initial, rest) = long(datagram, kind).ok_or(Unreadable)?;
        if kind == INITIAL {
            found.push(initial);
        }
        datagram = rest;
    }
    Ok(found)
}

/// A packet with a long head, and what follows it in its datagram.
fn long(datagram: &[u8], kind: u8) -> Option<(Initial<'_>, &[u8])> {
    let mut rest = datagram.get(5..)?;
    let mut to = &[][..];
    for at in 0..2 {
        let (&length, more) = rest.split_first()?;
        let (id, more) = more.split_at_checked(usize::from(length))?;
        if id.len() > MOST_ID {
            return None;
        }
        if at == 0 {
            to = id;
        }
        rest = more;
    }
    match kind {
        INITIAL => {
            let token = number(&mut rest)?;
            rest = rest.get(token..)?;
        }
        // Servers alone send it.
        RETRY => return None,
        _ => {}
    }
    let length = number(&mut rest)?;
    let number_at = datagram.len() - rest.len();
    let (packet, rest) = datagram.split_at_checked(number_at.checked_add(length)?)?;
    let initial = Initial {
        packet,
        number_at,
        to,
    };
    Some((initial, rest))
}

/// A number of one to eight bytes (RFC 9000, 16).
fn number(bytes: &mut &[u8]) -> Option<usize> {
    let length = 1 << (bytes.first()? >> 6);
    let (number, rest) = bytes.split_at_checked(length)?;
    *bytes = rest;
    let first = u64::from(number[0] & 0x3f);
    let number = number[1..]
        .iter()
        .fold(first, |sum, &byte| sum << 8 | u64::from(byte));
    usize::try_from(number).ok()
}

impl fmt::Debug for Keys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Keys").finish_non_exhaustive()
    }
}

impl Keys {
    /// Those of a client whose first packet went to this connection id.
    pub fn of(id: &[u8]) -> Option<Self> {
        let secret = hkdf::Salt::new(hkdf::HKDF_SHA256, &SALT).extract(id);
        let secret: [u8; 32] = expand(&secret, b"client in")?;
        let secret = hkdf::Prk::new_less_safe(hkdf::HKDF_SHA256, &secret);
        let packet: [u8; 16] = expand(&secret, b"quic key")?;
        let head: [u8; 16] = expand(&secret, b"quic hp")?;
        Some(Self {
            packet: LessSafeKey::new(UnboundKey::new(&aead::AES_128_GCM, &packet).ok()?),
            iv: expand(&secret, b"quic iv")?,
            head: quic::HeaderProtectionKey::new(&quic::AES_128, &head).ok()?,
        })
    }

    /// What a packet carries; `None`: it was encrypted with others.
    pub fn open(&self, initial: &Initial<'_>) -> Option<Vec<u8>> {
        let Initial {
            packet, number_at, ..
        } = *initial;
        // As if its number had four bytes.
        let sample = packet.get(number_at + 4..)?.first_chunk::<SAMPLE>()?;
        let mask = self.head.new_mask(sample).ok()?;
        let mut head = packet.get(..number_at + 4)?.to_vec();
        head[0] ^= mask[0] & 0x0f;
        if head[0] & RESERVED != 0 {
            // Seldom so with other keys.
            return None;
        }
        let length = usize::from(head[0] & 3) + 1;
        head.truncate(number_at + length);
        let mut nonce = self.iv;
        let counted = &mut nonce[aead::NONCE_LEN - length..];
        for ((byte, mask), own) in head[number_at..].iter_mut().zip(&mask[1..]).zip(counted) {
            *byte ^= mask;
            *own ^= *byte;
        }
        let mut text = packet[number_at + length..].to_vec();
        let nonce = Nonce::assume_unique_for_key(nonce);
        let opened = self
            .packet
            .open_in_place(nonce, Aad::from(&head), &mut text);
        let length = opened.ok()?.len();
        text.truncate(length);
        Some(text)
    }
}

/// HKDF-Expand-Label (RFC 8446, 7.1).
fn expand<const N: usize>(secret: &hkdf::Prk, label: &[u8]) -> Option<[u8; N]> {
    struct Length(usize);
    impl hkdf::KeyType for Length {
        fn len(&self) -> usize {
            self.0
        }
    }
    let prefix = b"tls13 ";
    let lengths = [0, N as u8, (prefix.len() + label.len()) as u8];
    let info = [&lengths[..], prefix, label, &[0]];
    let mut bytes = [0; N];
    let expanded = secret.expand(&info, Length(N)).ok()?;
    expanded.fill(&mut bytes).ok()?;
    Some(bytes)
}

/// What an Initial packet carries of handshake messages (RFC 9000, 12.4); `None`: no client sends that in one.
pub fn pieces(mut text: &[u8]) -> Option<Vec<Piece<'_>>> {
    let mut pieces = Vec::new();
    while let Some((&kind, rest)) = text.split_first() {
        text = rest;
        match kind {
            PADDING | PING => {}
            ACK | ACK_ECN => {
                let [_largest, _delay, ranges, _first] = numbers(&mut text)?;
                for _ in 0..ranges {
                    let [_gap, _length] = numbers(&mut text)?;
                }
                if kind == ACK_ECN {
                    let [_, _, _] = numbers(&mut text)?;
                }
            }
            CRYPTO => {
                let [at, length] = numbers(&mut text)?;
                let (piece, rest) = text.split_at_checked(length)?;
                pieces.push((at, piece));
                text = rest;
            }
            CLOSE => {
                let [_error, _frame, reason] = numbers(&mut text)?;
                text = text.get(reason..)?;
            }
            _ => return None,
        }
    }
    Some(pieces)
}

fn numbers<const N: usize>(bytes: &mut &[u8]) -> Option<[usize; N]> {
    let mut numbers = [0; N];
    for own in &mut numbers {
        *own = number(bytes)?;
    }
    Some(numbers)
}

/// A long head begins with this bit.
pub(super) const LONG: u8 = 0x80;
const VERSION_1: u32 = 1;
const VERSION_2: u32 = 0x6b33_43cf;
const FIRST_DRAFT: u32 = 0xff00_0000;
const LAST_DRAFT: u32 = 0xff00_00ff;
const INITIAL: u8 = 0;
const RETRY: u8 = 3;
/// A connection id is no longer.
const MOST_ID: usize = 20;
/// These bits are none in a packet of version 1 (RFC 9000, 17.2).
const RESERVED: u8 = 0x0c;
/// Bytes of a packet that its head is hidden by.
const SAMPLE: usize = 16;
const PADDING: u8 = 0;
const PING: u8 = 1;
const ACK: u8 = 2;
const ACK_ECN: u8 = 3;
const CRYPTO: u8 = 6;
const CLOSE: u8 = 0x1c;
/// Of version 1.
const SALT: [u8; 20] = [
    0x38, 0x76, 0x2c, 0xf7, 0xf5, 0x59, 0x34, 0xb3, 0x4d, 0x17, 0x9a, 0xe6, 0xa4, 0xc8, 0x0c, 0xad,
    0xcc, 0xbb, 0x7f, 0x0a,
];

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// A connection id, and what a client's first packet to it carries, as RFC 9001, A.1 has the keys.
    pub(in crate::wire) const ID: [u8; 8] = [0x83, 0x94, 0xc8, 0xf0, 0x3e, 0x51, 0x57, 0x08];

    /// A piece of a client's messages, as its packet says it.
    pub(in crate::wire) fn crypto(at: usize, piece: &[u8]) -> Vec<u8> {
        let long = |number: usize| (0x8000_0000 | number as u32).to_be_bytes();
        [&[CRYPTO][..], &long(at), &long(piece.len()), piece].concat()
    }

    /// A packet with this number to `to`, encrypted with the keys of a client whose first one went to `keys`.
    pub(in crate::wire) fn packet(keys: &[u8], to: &[u8], number: u8, text: &[u8]) -> Vec<u8> {
        let keys = Keys::of(keys).unwrap();
        let mut text = text.to_vec();
        text.resize(text.len().max(32), PADDING);
        let length = 0x4000 | (text.len() + 16 + 1) as u16;
        let ids = [&[to.len() as u8][..], to, &[0, 0]].concat();
        let head = [
            &[0xc0, 0, 0, 0, 1][..],
            &ids,
            &length.to_be_bytes(),
            &[number],
        ]
        .concat();
        let mut nonce = keys.iv;
        nonce[11] ^= number;
        let nonce = Nonce::assume_unique_for_key(nonce);
        let sealed = keys
            .packet
            .seal_in_place_append_tag(nonce, Aad::from(&head), &mut text);
        sealed.unwrap();
        let mask = keys.head.new_mask(&text[3..][..SAMPLE]).unwrap();
        let mut packet = [&head[..], &text].concat();
        packet[0] ^= mask[0] & 0x0f;
        packet[head.len() - 1] ^= mask[1];
        packet
    }

    #[test]
    fn keys_are_those_of_the_standard() {
        let secret = hkdf::Salt::new(hkdf::HKDF_SHA256, &SALT).extract(&ID);
        let secret: [u8; 32] = expand(&secret, b"client in").unwrap();
        assert_eq!(secret[..4], [0xc0, 0x0c, 0xf1, 0x51]);
        let secret = hkdf::Prk::new_less_safe(hkdf::HKDF_SHA256, &secret);
        let key: [u8; 16] = expand(&secret, b"quic key").unwrap();
        let iv: [u8; 12] = expand(&secret, b"quic iv").unwrap();
        let head: [u8; 16] = expand(&secret, b"quic hp").unwrap();
        assert_eq!(
            key,
            0x1f36_9613_dd76_d546_7730_efcb_e3b1_a22d_u128.to_be_bytes()
        );
        assert_eq!(iv[..8], 0xfa04_4b2f_42a3_fd3b_u64.to_be_bytes());
        assert_eq!(
            head,
            0x9f50_449e_04a0_e810_283a_1e99_33ad_edd2_u128.to_be_bytes()
        );
    }

    #[test]
    fn packets_are_found_one_behind_the_other_and_opened_with_their_own_keys() {
        let text = [crypto(0, b"one"), vec![ACK, 4, 0, 0, 1], crypto(7, b"two")].concat();
        let first = packet(&ID, &ID, 2, &text);
        let mut early = first.clone();
        early[0] = 0xd0;
        early.remove(5 + 1 + ID.len() + 1);
        let datagram = [&first[..], &early, &packet(&ID, &[1], 3, &[PING]), &[0; 50]].concat();
        let found = initials(&datagram).unwrap();
        assert_eq!([found[0].to, found[1].to], [&ID[..], &[1]]);
        let keys = Keys::of(&ID).unwrap();
        let opened = keys.open(&found[0]).unwrap();
        assert_eq!(pieces(&opened).unwrap(), [(0, &b"one"[..]), (7, b"two")]);
        assert!(keys.open(&found[1]).is_some());
        assert!(Keys::of(&[1]).unwrap().open(&found[1]).is_none());
        // Any other bit is another packet.
        for at in 0..first.len() {
            let mut other = first.clone();
            other[at] ^= 1;
            let opened =
                initials(&other).map(|found| found.iter().any(|it| keys.open(it).is_some()));
            assert_ne!(opened, Ok(true), "{at}");
        }
        for length in 0..first.len() {
            let cut = initials(&first[..length]);
            assert!(cut.is_err() || cut == Ok(Vec::new()), "{length}");
        }
    }

    #[test]
    fn what_is_not_of_quic_has_no_packets_and_other_versions_are_not_read() {
        let of = |version: u32| [&[0xc3][..], &version.to_be_bytes(), &[1, 2, 0, 0, 9]].concat();
        for version in [0, 2, 0x0a0a_0a0a, 0xff01_0000, 0x0100_0001] {
            assert_eq!(initials(&of(version)), Ok(Vec::new()), "{version:x}");
        }
        for version in [1, VERSION_2, 0xff00_001d] {
            assert_eq!(initials(&of(version)), Err(Unreadable), "{version:x}");
        }
        assert_eq!(initials(b"\x80\x00"), Ok(Vec::new()));
        assert_eq!(initials(b"GET / HTTP/1.1"), Ok(Vec::new()));
        for text in [
            &[8][..],
            &[CRYPTO, 0, 9, 1],
            &[ACK, 0, 0, 0x7f, 0xff, 0],
            &[CLOSE, 0, 0, 3, 1],
        ] {
            assert_eq!(pieces(text), None, "{text:?}");
        }
    }
}
