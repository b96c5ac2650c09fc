//! What is said of an interface on the command line, and what a device says of its own.

use std::path::Path;

use vnplug::{Client, Device};
use vnplug_frame::aggregate::MAX_SEGMENTS;

/// The MTU of a device's interface; of a device without one, that of any Ethernet.
pub(crate) fn mtu_of(socket: &Path, device: &str) -> u16 {
    let devices = Client::connect_to(socket).and_then(|mut client| client.devices());
    let own = |devices: Vec<Device>| devices.into_iter().find(|known| known.name == device);
    let mtu = devices.ok().and_then(own).map_or(0, |device| device.mtu);
    match u16::try_from(mtu).unwrap_or(u16::MAX) {
        0 => 1500,
        mtu => mtu.clamp(68, 65521),
    }
}

/// A name that the kernel takes (`dev_valid_name` in its net/core/dev.c).
pub(crate) fn interface_name(text: &str) -> Result<String, String> {
    // The kernel has room for 15 bytes; a number takes the place of `%d`.
    if text.is_empty() || text.len() > 15 {
        return Err("an interface's name has 1 to 15 characters".to_owned());
    }
    let odd = |c: char| c.is_whitespace() || c.is_control() || "/:".contains(c);
    if text.contains(odd) || matches!(text, "." | "..") {
        return Err("an interface's name has no spaces and no `/` or `:`".to_owned());
    }
    if text.replacen("%d", "", 1).contains('%') {
        return Err("`%` is only allowed in one `%d`".to_owned());
    }
    Ok(text.to_owned())
}

/// `02:00:00:00:00:01`; not a group address.
pub(crate) fn mac(text: &str) -> Result<[u8; 6], String> {
    let wrong = || format!("`{text}` is not an address; write for example 02:00:00:00:00:01");
    let bytes: Option<Vec<u8>> = text
        .split(':')
        .map(|byte| {
            let hex = byte.bytes().all(|digit| digit.is_ascii_hexdigit());
            let byte = Some(byte).filter(|byte| hex && byte.len() <= 2)?;
            u8::from_str_radix(byte, 16).ok()
        })
        .collect();
    let mac: [u8; 6] = bytes
        .and_then(|bytes| bytes.try_into().ok())
        .ok_or_else(wrong)?;
    match mac[0] & 1 == 0 && mac != [0; 6] {
        true => Ok(mac),
        false => Err(format!("`{text}` is a group address or zero")),
    }
}

/// `off`, or a number of segments.
pub(crate) fn gro(text: &str) -> Result<u8, String> {
    let most = 2..=MAX_SEGMENTS;
    match text.parse() {
        // One segment is as it came.
        Ok(1) => Ok(0),
        _ if text == "off" => Ok(0),
        Ok(segments) if most.contains(&usize::from(segments)) => Ok(segments),
        _ => Err(format!(
            "how many segments become one: 1 to {MAX_SEGMENTS}, or off"
        )),
    }
}

/// What the TUN driver takes as an MTU.
pub(crate) const MTUS: std::ops::RangeInclusive<i64> = 68..=65521;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_addresses_that_no_interface_can_have_are_refused() {
        for name in ["vn0", "vn%d", "a.b-c_d", "exactly15chars_"] {
            assert!(interface_name(name).is_ok(), "{name}");
        }
        for name in [
            "",
            "sixteen-chars-16",
            "a/b",
            "a b",
            "a:b",
            ".",
            "..",
            "vn%s",
            "%d%d",
        ] {
            assert!(interface_name(name).is_err(), "{name}");
        }
        assert_eq!(mac("02:0:00:00:00:fF"), Ok([2, 0, 0, 0, 0, 0xff]));
        for text in [
            "",
            "02",
            "02:00:00:00:00",
            "02:00:00:00:00:00:00",
            "01:00:00:00:00:00",
            "00:00:00:00:00:00",
            "+2:00:00:00:00:00:01",
            "002:0:0:0:0:1",
        ] {
            assert!(mac(text).is_err(), "{text}");
        }
    }
}
