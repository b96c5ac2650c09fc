//! The name in a client's certificate, for the log. Who may come in was decided before, by the CA that signed it.

use sha2::{Digest, Sha256};

use crate::text::escape;

/// The certificate's common name, if it has one alone, else the start of its SHA-256.
pub(crate) fn name(der: &[u8]) -> String {
    let names = common_names(der).unwrap_or_default();
    match &names[..] {
        [name] if (1..=64).contains(&name.len()) => escape(name),
        _ => {
            let hash = Sha256::digest(der);
            let start = hash.iter().take(8).map(|byte| format!("{byte:02x}"));
            format!("certificate {}", start.collect::<String>())
        }
    }
}

/// All common names of the subject (RFC 5280, 4.1); `None` if this is no certificate.
fn common_names(der: &[u8]) -> Option<Vec<String>> {
    let mut outer = Values(der);
    let mut certificate = Values(outer.of(SEQUENCE)?);
    let mut signed = Values(certificate.of(SEQUENCE)?);
    let (mut tag, mut value) = signed.next()?;
    if tag == VERSION {
        (tag, value) = signed.next()?;
    }
    // The serial number, then signature, issuer and validity.
    if tag != INTEGER || value.is_empty() {
        return None;
    }
    for _ in 0..3 {
        signed.of(SEQUENCE)?;
    }
    let mut subject = Values(signed.of(SEQUENCE)?);
    let mut names = Vec::new();
    while !subject.0.is_empty() {
        let mut set = Values(subject.of(SET)?);
        while !set.0.is_empty() {
            let mut attribute = Values(set.of(SEQUENCE)?);
            let kind = attribute.of(OID)?;
            let (tag, text) = attribute.next()?;
            if kind == COMMON_NAME && STRINGS.contains(&tag) {
                names.push(String::from_utf8_lossy(text).into_owned());
            }
        }
    }
    Some(names)
}

/// Values of DER, one after the other.
struct Values<'a>(&'a [u8]);

impl<'a> Values<'a> {
    fn next(&mut self) -> Option<(u8, &'a [u8])> {
        let (&tag, rest) = self.0.split_first()?;
        let (&first, rest) = rest.split_first()?;
        let (len, rest) = match first {
            0..=0x7f => (usize::from(first), rest),
            0x81..=0x83 => {
                let (digits, rest) = rest.split_at_checked(usize::from(first - 0x80))?;
                let len = digits
                    .iter()
                    .fold(0, |len, digit| len << 8 | usize::from(*digit));
                (len, rest)
            }
            _ => return None,
        };
        let (value, rest) = rest.split_at_checked(len)?;
        self.0 = rest;
        Some((tag, value))
    }

    /// The next one, if it is of this kind.
    fn of(&mut self, wanted: u8) -> Option<&'a [u8]> {
        let (tag, value) = self.next()?;
        (tag == wanted).then_some(value)
    }
}

const INTEGER: u8 = 0x02;
const OID: u8 = 0x06;
const SEQUENCE: u8 = 0x30;
const SET: u8 = 0x31;
/// `[0]`, constructed.
const VERSION: u8 = 0xa0;
/// UTF8String, PrintableString, IA5String.
const STRINGS: [u8; 3] = [0x0c, 0x13, 0x16];
/// 2.5.4.3 (RFC 5280, A.1).
const COMMON_NAME: &[u8] = &[0x55, 4, 3];

#[cfg(test)]
mod tests {
    use super::*;

    fn value(tag: u8, content: &[&[u8]]) -> Vec<u8> {
        let content = content.concat();
        let mut bytes = vec![tag];
        match content.len() {
            len @ 0..=0x7f => bytes.push(len as u8),
            len => bytes.extend([0x82, (len >> 8) as u8, len as u8]),
        }
        bytes.extend(content);
        bytes
    }

    fn certificate(subject: &[&[u8]]) -> Vec<u8> {
        let signed = [
            value(VERSION, &[&value(INTEGER, &[&[2]])]),
            value(INTEGER, &[&[1, 2, 3]]),
            value(SEQUENCE, &[]),
            value(SEQUENCE, &[]),
            value(SEQUENCE, &[]),
            value(SEQUENCE, subject),
            value(SEQUENCE, &[&[0; 300]]),
        ];
        value(SEQUENCE, &[&value(SEQUENCE, &[&signed.concat()])])
    }

    fn attribute(kind: &[u8], tag: u8, text: &str) -> Vec<u8> {
        let parts = [value(OID, &[kind]), value(tag, &[text.as_bytes()])];
        value(SET, &[&value(SEQUENCE, &[&parts.concat()])])
    }

    #[test]
    fn the_common_name_is_found() {
        let country = attribute(&[0x55, 4, 6], 0x13, "DE");
        let one = attribute(COMMON_NAME, 0x0c, "alice\u{202e}\n");
        let der = certificate(&[&country, &one]);
        assert_eq!(name(&der), "alice\\u{202e}\\x0a");
        for odd in [
            certificate(&[&country]),
            certificate(&[&one, &one]),
            certificate(&[&attribute(COMMON_NAME, 0x0c, &"x".repeat(65))]),
            certificate(&[&attribute(COMMON_NAME, 0x04, "x")]),
        ] {
            assert!(name(&odd).starts_with("certificate "), "{}", name(&odd));
        }
    }

    #[test]
    fn what_is_cut_or_changed_is_no_name_and_no_panic() {
        let der = certificate(&[&attribute(COMMON_NAME, 0x0c, "alice")]);
        for end in 0..der.len() {
            assert!(!name(&der[..end]).is_empty());
        }
        for at in 0..der.len() {
            for byte in [0, 1, 0x7f, 0x80, 0x81, 0x84, 0xff] {
                let mut odd = der.clone();
                odd[at] = byte;
                assert!(!name(&odd).is_empty());
            }
        }
    }
}
