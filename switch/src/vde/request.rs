//! What a client asks of the `ctl` socket, and the answer.
//!
//! Versions 1 and 3, packed, integers in the byte order of the machine; `sockaddr_un` is 110 bytes
//! (`src/vde_switch/datasock.c` of vde-2 2.3.3):
//!
//! ```text
//! v3: magic u32 = 0xfeedface | version u32 = 3 | type u32 | sockaddr_un | description …
//! v1: magic u32 = 0xfeedface | type u32 | address [u8; 6] | sockaddr_un | description …
//! ```
//!
//! The low byte of `type` is 0 (a port) or 1 (a port that nobody else gets by chance); the rest is
//! the number of the port that is wanted, or 0.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use crate::forward::{MAX_PORTS, Number};

/// A client's request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Request {
    /// Where its data socket is.
    pub(crate) socket: PathBuf,
    /// The port that it wants, if it wants a certain one.
    pub(crate) port: Option<Number>,
    /// What it says of itself.
    pub(crate) description: String,
}

/// The most bytes of a request that are read; what is beyond is no more than description.
pub(crate) const MAX_REQUEST: usize = 256;

const MAGIC: u32 = 0xfeed_face;
/// Bytes of a `sockaddr_un`, and of the family in it.
const ADDRESS: usize = 110;
const FAMILY: usize = 2;
const AF_UNIX: u16 = 1;

impl Request {
    /// Reads a request.
    ///
    /// # Errors
    /// What is wrong with it.
    pub(crate) fn parse(bytes: &[u8]) -> Result<Self, String> {
        let word = |at: usize| {
            let word = bytes.get(at..at + 4)?;
            Some(u32::from_ne_bytes(word.try_into().ok()?))
        };
        if word(0) != Some(MAGIC) {
            return Err("it is no request of VDE (its first four bytes are not 0xfeedface)".into());
        }
        let short = || format!("a request of {} bytes is too short", bytes.len());
        let second = word(4).ok_or_else(short)?;
        let (kind, address) = match second {
            3 => (word(8).ok_or_else(short)?, 12),
            // Version 1 has its type in this place.
            kind @ (0 | 1) => (kind, 14),
            other => return Err(format!("version {other} of the protocol is not known")),
        };
        let name = bytes.get(address..address + ADDRESS).ok_or_else(short)?;
        let (family, name) = name.split_at(FAMILY);
        if family != AF_UNIX.to_ne_bytes() {
            return Err("its data socket is no Unix socket".into());
        }
        let name = name.split(|byte| *byte == 0).next().unwrap_or_default();
        let socket = Path::new(OsStr::from_bytes(name)).to_owned();
        if !socket.is_absolute() {
            return Err("its data socket has no absolute path".into());
        }
        if kind & 0xff > 1 {
            return Err(format!("type {} of a request is not known", kind & 0xff));
        }
        let port = match kind >> 8 {
            0 => None,
            wanted => {
                let number = Number::try_from(wanted).ok();
                let number = number.filter(|it| usize::from(*it) <= MAX_PORTS);
                Some(number.ok_or_else(|| format!("there is no port {wanted}"))?)
            }
        };
        let rest = &bytes[address + ADDRESS..];
        let text = rest.split(|byte| *byte == 0).next().unwrap_or_default();
        let text = String::from_utf8_lossy(text);
        Ok(Self {
            socket,
            port,
            description: text.chars().filter(|it| !it.is_control()).collect(),
        })
    }
}

/// The answer: the name of our data socket.
pub(crate) fn answer(path: &Path) -> Result<[u8; ADDRESS], String> {
    let name = path.as_os_str().as_bytes();
    let mut answer = [0; ADDRESS];
    answer[..FAMILY].copy_from_slice(&AF_UNIX.to_ne_bytes());
    match answer[FAMILY..].split_at_mut_checked(name.len()) {
        // A zero is at its end.
        Some((place, [_, ..])) => place.copy_from_slice(name),
        _ => return Err(format!("{} is too long for a socket", path.display())),
    }
    Ok(answer)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn v3(kind: u32, path: &str, text: &[u8]) -> Vec<u8> {
        let words = [MAGIC, 3, kind].map(u32::to_ne_bytes).concat();
        [&words, &answer(Path::new(path)).unwrap()[..], text].concat()
    }

    #[test]
    fn both_versions_are_read() {
        let request = Request::parse(&v3(0, "/run/a.ctl/.1-2", b"me\nhere\0junk")).unwrap();
        assert_eq!(request.socket, Path::new("/run/a.ctl/.1-2"));
        assert_eq!(
            (request.port, request.description.as_str()),
            (None, "mehere")
        );
        assert_eq!(
            Request::parse(&v3(7 << 8, "/a", b"")).unwrap().port,
            Some(7)
        );
        let mut v1 = [MAGIC, 1].map(u32::to_ne_bytes).concat();
        v1.extend([0; 6]);
        v1.extend(answer(Path::new("/tmp/x")).unwrap());
        assert_eq!(Request::parse(&v1).unwrap().socket, Path::new("/tmp/x"));
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (bytes, part) in [
            (b"hello".to_vec(), "0xfeedface"),
            (v3(0, "/a", b"")[..100].to_vec(), "too short"),
            (v3(0, "relative", b""), "absolute"),
            (v3(0, "", b""), "absolute"),
            (v3(9, "/a", b""), "type 9"),
            (v3(70_000 << 8, "/a", b""), "no port 70000"),
            ([MAGIC, 2].map(u32::to_ne_bytes).concat(), "version 2"),
            ([MAGIC, 4].map(u32::to_ne_bytes).concat(), "version 4"),
        ] {
            let error = Request::parse(&bytes).unwrap_err();
            assert!(error.contains(part), "{error}");
        }
        let mut other = v3(0, "/a", b"");
        other[12] = 9;
        assert!(Request::parse(&other).unwrap_err().contains("Unix"));
    }

    #[test]
    fn an_answer_is_an_address_with_a_zero_at_its_end() {
        let bytes = answer(Path::new("/run/x")).unwrap();
        assert_eq!(&bytes[2..9], b"/run/x\0");
        assert!(answer(Path::new(&"x".repeat(107))).is_ok());
        assert!(answer(Path::new(&"x".repeat(108))).is_err());
    }
}
