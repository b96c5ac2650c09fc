//! A name of the DNS, made canonical once.
//!
//! Names are compared as this type alone, never as text: what is equal here is one name for every
//! resolver. There is no NUL in it, no upper case, no dot at the end, no empty label, no label and no
//! name longer than RFC 1035 (section 2.3.4) allows, and nothing outside ASCII. What an
//! address parser would take for an address is not a name.

use std::fmt;
use std::sync::Arc;

/// A name as the DNS carries it: lower-case ASCII, labels with dots between.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Name(Arc<str>);

impl Name {
    /// The name that `text` means, international labels included (`bücher.example`). One dot at the end, which
    /// makes a name absolute, is taken off.
    ///
    /// # Errors
    /// [`BadName`] says what is wrong.
    pub fn new(text: &str) -> Result<Self, BadName> {
        let text = text.strip_suffix('.').unwrap_or(text);
        if text.is_ascii() {
            return Self::from_labels(text.split('.').map(str::as_bytes));
        }
        // What is looked at in ASCII below stays unlooked at here: its own rules differ by list.
        let ascii = idna::domain_to_ascii_cow(text.as_bytes(), idna::AsciiDenyList::EMPTY)
            .map_err(|_| BadName::International)?;
        let ascii = ascii.strip_suffix('.').unwrap_or(&ascii);
        Self::from_labels(ascii.split('.').map(str::as_bytes))
    }

    /// The name of these labels, as a message of the DNS has them. A dot inside a label is refused: written
    /// as text it would be another name.
    ///
    /// # Errors
    /// [`BadName`] says what is wrong.
    pub fn from_labels<'a>(labels: impl IntoIterator<Item = &'a [u8]>) -> Result<Self, BadName> {
        let mut name = String::new();
        let mut last = "";
        for label in labels {
            if label.is_empty() || label.len() > LABEL {
                return Err(BadName::Label(label.len()));
            }
            let allowed = |byte: &u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_');
            if let Some(&byte) = label.iter().find(|byte| !allowed(byte)) {
                return Err(BadName::Byte(byte));
            }
            // All of it is ASCII by now.
            last = std::str::from_utf8(label).map_err(|_| BadName::Byte(label[0]))?;
            if !name.is_empty() {
                name.push('.');
            }
            name.extend(last.chars().map(|c| c.to_ascii_lowercase()));
            if name.len() > LENGTH {
                return Err(BadName::Long(name.len()));
            }
        }
        if name.is_empty() {
            return Err(BadName::Label(0));
        }
        if is_number(last) {
            return Err(BadName::Address);
        }
        Ok(Self(name.into()))
    }

    /// The name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// True if this name lies below `domain`, at any depth. No name lies below itself.
    pub fn is_below(&self, domain: &Self) -> bool {
        let rest = self.0.strip_suffix(&*domain.0);
        rest.is_some_and(|rest| rest.len() > 1 && rest.ends_with('.'))
    }

    /// The name without its first label, if two labels or more are left: `example.org` of
    /// `www.example.org`, nothing of `example.org`.
    pub fn parent(&self) -> Option<Self> {
        let (_, parent) = self.0.split_once('.')?;
        parent.contains('.').then(|| Self(parent.into()))
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Why some text is no name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BadName {
    /// A label is empty or longer than 63 bytes; its length.
    Label(usize),
    /// The name is longer than 253 bytes.
    Long(usize),
    /// A byte that no name of a host has: a NUL, a blank, a dot inside a label, …
    Byte(u8),
    /// International, and not by the rules of IDNA.
    International,
    /// Its last label is a number: an address to those who read addresses generously.
    Address,
}

impl std::error::Error for BadName {}

impl fmt::Display for BadName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Label(0) => write!(f, "a part of the name is empty"),
            Self::Label(length) => write!(
                f,
                "a part of the name has {length} bytes, of {LABEL} allowed"
            ),
            Self::Long(length) => write!(f, "the name has {length} bytes, of {LENGTH} allowed"),
            Self::Byte(byte) => write!(f, "the byte {byte:#04x} is in no name of a host"),
            Self::International => {
                write!(f, "not a name by the rules of international names (IDNA)")
            }
            Self::Address => write!(f, "it ends in a number, as an address does"),
        }
    }
}

/// `127`, `0x7f`: what `inet_aton` and browsers read as part of an address.
fn is_number(label: &str) -> bool {
    let hex = label
        .strip_prefix("0x")
        .or_else(|| label.strip_prefix("0X"));
    label.bytes().all(|byte| byte.is_ascii_digit())
        || hex.is_some_and(|digits| digits.bytes().all(|byte| byte.is_ascii_hexdigit()))
}

/// Bytes of a label and of a name with its dots: RFC 1035, section 2.3.4 (255 on the wire).
const LABEL: usize = 63;
const LENGTH: usize = 253;

#[cfg(test)]
mod tests {
    use super::*;

    fn name(text: &str) -> Name {
        Name::new(text).unwrap()
    }

    #[test]
    fn every_way_to_write_a_name_is_one_name() {
        for text in ["example.org", "EXAMPLE.org", "Example.ORG."] {
            assert_eq!(name(text).as_str(), "example.org");
        }
        for text in [
            "bücher.example",
            "BÜCHER.example",
            "xn--bcher-kva.example",
            "bu\u{308}cher.example。",
        ] {
            assert_eq!(name(text).as_str(), "xn--bcher-kva.example", "{text}");
        }
        // A full stop of another script is a dot for a resolver.
        assert_eq!(name("evil。example.org").as_str(), "evil.example.org");
        assert_eq!(name("_dmarc.example.org").as_str(), "_dmarc.example.org");
    }

    #[test]
    fn what_two_readers_could_read_in_two_ways_is_no_name() {
        let long = "a".repeat(64);
        let deep = "a.".repeat(127) + "ab";
        for text in [
            "",
            ".",
            "..",
            "a..b",
            ".a",
            "a..",
            "evil.com\0.example.org",
            "a b.org",
            "a/b",
            "a@b",
            "a%2eb",
            "[::1]",
            "127.0.0.1",
            "2130706433",
            "0x7f.1",
            "a.0X7F",
            "0x",
            long.as_str(),
            deep.as_str(),
            "evil.com\0.bücher.example",
            "bü cher.example",
            "a\u{2024}\0b",
        ] {
            assert!(
                Name::new(text).is_err(),
                "{text:?} is {:?}",
                Name::new(text)
            );
        }
        assert_eq!(
            Name::from_labels([b"a.b".as_slice(), b"org"]),
            Err(BadName::Byte(b'.'))
        );
        assert!(Name::new(&"a".repeat(63)).is_ok());
    }

    #[test]
    fn below_means_whole_labels() {
        let domain = name("example.org");
        assert!(name("www.example.org").is_below(&domain));
        assert!(name("a.b.example.org").is_below(&domain));
        for text in [
            "example.org",
            "evilexample.org",
            "example.org.evil.com",
            "org",
        ] {
            assert!(!name(text).is_below(&domain), "{text}");
        }
        assert_eq!(name("www.example.org").parent(), Some(domain.clone()));
        assert_eq!(domain.parent(), None);
    }

    #[test]
    fn whatever_comes_in_what_comes_out_is_canonical() {
        // Bytes that mean something to some reader, in every arrangement of a small generator.
        let parts = [
            "a", "B", ".", "\0", "ü", "xn--", "-", "_", "1", "。", " ", "\u{ad}", "ß", "\u{200d}",
        ];
        let mut state = 1_u64;
        for _ in 0..20_000 {
            let mut text = String::new();
            for _ in 0..=(state >> 40) % 8 {
                state = state
                    .wrapping_mul(6_364_136_223_846_793_005)
                    .wrapping_add(1_442_695_040_888_963_407);
                text += parts[usize::try_from(state >> 33).unwrap() % parts.len()];
            }
            let Ok(name) = Name::new(&text) else { continue };
            let written = name.as_str();
            assert!(
                !written.ends_with('.') && written.len() <= LENGTH,
                "{text:?}"
            );
            let plain = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b"-_.".contains(&b);
            assert!(written.bytes().all(plain), "{text:?} became {written:?}");
            assert_eq!(Name::new(written), Ok(name.clone()), "{text:?}");
        }
    }
}
