//! What follows `vnplug://`: the switch, and options as other modules of libvdeplug write them.
//!
//! `lan0`, `lan0[ring=4M]`, `lan0[direct=yes]`, `lan0[socket='/run/my.sock'/ring=4M]`. Options stand in brackets and are
//! separated by slashes; a value with slashes is put in quotes, or each has a backslash before it.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;

use vnplug_ring::units;

/// A switch and how to join it.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Address {
    /// The device, as `host:lan0`.
    pub(crate) device: String,
    /// The daemon's or agent's socket, if not the usual one.
    pub(crate) socket: Option<PathBuf>,
    /// Bytes of each of the two rings; 0 = the usual ones.
    pub(crate) ring_bytes: u64,
    /// Other ports of this user that say so, too, are handed frames without the switch.
    pub(crate) direct: bool,
}

impl Address {
    /// # Errors
    /// What is wrong with it, and what to write.
    pub(crate) fn parse(text: &[u8]) -> Result<Self, String> {
        let mut parts = split(text)?.into_iter();
        let name = parts.next().map(text_of).transpose()?.unwrap_or_default();
        let device = match name.as_str() {
            "" => return Err("name the switch: vnplug://lan0".into()),
            name if name.contains(':') => name.to_owned(),
            name => format!("host:{name}"),
        };
        let mut address = Self {
            device,
            ..Self::default()
        };
        for part in parts {
            let at = part.iter().position(|&byte| byte == b'=');
            let (key, value) = match at {
                Some(at) => (&part[..at], &part[at + 1..]),
                None => (&part[..], &[][..]),
            };
            match (key, value) {
                (b"", b"") => {}
                (_, b"") => {
                    let part = String::from_utf8_lossy(&part);
                    return Err(format!("'{part}': options are KEY=VALUE; {KNOWN}"));
                }
                (b"socket", path) => {
                    address.socket = Some(OsString::from_vec(path.to_vec()).into());
                }
                (b"ring", size) => {
                    let size = text_of(size.to_vec())?;
                    address.ring_bytes = units::size(&size).map_err(|bad| bad.to_string())?;
                }
                (b"direct", b"yes") => address.direct = true,
                (b"direct", b"no") => address.direct = false,
                (b"direct", _) => return Err("direct is yes or no".into()),
                (key, _) => {
                    let key = String::from_utf8_lossy(key);
                    return Err(format!("no option '{key}'; {KNOWN}"));
                }
            }
        }
        Ok(address)
    }
}

/// The name and the options, without brackets, quotes and backslashes.
fn split(text: &[u8]) -> Result<Vec<Vec<u8>>, String> {
    let mut parts = vec![Vec::new()];
    let mut quote = None;
    let mut bytes = text.iter().copied();
    while let Some(byte) = bytes.next() {
        let is_name = parts.len() == 1;
        match (byte, quote) {
            (b'\\', _) => {
                let next = bytes.next().ok_or("a backslash at the end")?;
                push(&mut parts, next);
            }
            (_, Some(open)) if byte == open => quote = None,
            (_, Some(_)) => push(&mut parts, byte),
            (b'\'' | b'"', None) => quote = Some(byte),
            (b'[', None) if is_name => parts.push(Vec::new()),
            (b'/', None) if !is_name => parts.push(Vec::new()),
            (b']', None) if !is_name => match bytes.next() {
                None => return Ok(parts),
                Some(_) => return Err("text after the options' bracket".into()),
            },
            _ => push(&mut parts, byte),
        }
    }
    match (quote, parts.len()) {
        (None, 1) => Ok(parts),
        (None, _) => Err("the options' bracket is not closed".into()),
        (Some(quote), _) => Err(format!("the quote {} is not closed", char::from(quote))),
    }
}

fn push(parts: &mut [Vec<u8>], byte: u8) {
    if let Some(part) = parts.last_mut() {
        part.push(byte);
    }
}

fn text_of(bytes: Vec<u8>) -> Result<String, String> {
    String::from_utf8(bytes).map_err(|_| "a name or number that is no UTF-8".into())
}

const KNOWN: &str = "there are socket='PATH', ring=SIZE and direct=yes, with slashes between: \
                     vnplug://lan0[socket='/run/my.sock'/ring=4M]";

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Address, String> {
        Address::parse(text.as_bytes())
    }

    #[test]
    fn a_name_alone_is_a_switch_of_the_host() {
        let lan0 = Address {
            device: "host:lan0".into(),
            ..Address::default()
        };
        assert_eq!(parse("lan0").unwrap(), lan0);
        assert_eq!(parse("host:lan0").unwrap(), lan0);
        assert_eq!(parse("lan0[]").unwrap(), lan0);
    }

    #[test]
    fn options_are_written_as_for_other_modules() {
        let with = |path: &str, ring_bytes| Address {
            device: "host:lan0".into(),
            socket: Some(path.into()),
            ring_bytes,
            direct: false,
        };
        for (text, address) in [
            ("lan0[socket='/run/x'/ring=4M]", with("/run/x", 4 << 20)),
            ("lan0[ring=65536/socket=\"/a b\"]", with("/a b", 65536)),
            ("lan0[socket=\\/run\\/it\\'s]", with("/run/it's", 0)),
            ("lan0[socket=x]", with("x", 0)),
        ] {
            assert_eq!(parse(text).unwrap(), address, "{text}");
        }
        assert!(parse("lan0[direct=yes]").unwrap().direct);
        assert!(!parse("lan0[direct=yes/direct=no]").unwrap().direct);
    }

    #[test]
    fn what_cannot_be_meant_is_refused_with_a_remedy() {
        for (text, part) in [
            ("", "vnplug://lan0"),
            ("[ring=4M]", "vnplug://lan0"),
            ("lan0[socket=/run/x]", "KEY=VALUE"),
            ("lan0[ring]", "KEY=VALUE"),
            ("lan0[3]", "KEY=VALUE"),
            ("lan0[port=3]", "no option 'port'"),
            ("lan0[ring=much]", "much"),
            ("lan0[direct=1]", "yes or no"),
            ("lan0[ring=1M", "not closed"),
            ("lan0[socket='/run]", "not closed"),
            ("lan0[ring=1M]x", "after"),
            ("lan0\\", "backslash"),
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.contains(part), "{text}: {error}");
        }
    }
}
