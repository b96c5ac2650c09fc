//! Which devices are ours, and the list of all.
//!
//! Our part of the list is made with the C library's malloc in the layout of the real library's, and
//! appended to it, so that the real library frees all of it, whichever `pcap_freealldevs` a program
//! calls. It comes last: the first device is what programs take by default.
#![expect(unsafe_code, reason = "a list in C's memory")]

use std::ffi::{CString, c_char, c_int};
use std::net::IpAddr;
use std::ptr;
use std::sync::Once;
use std::time::Duration;

use vnplug::{Client, Device, Error, split_group};

use crate::abi::{
    ERRBUF_SIZE, ERROR, IF_CONNECTED, IF_DISCONNECTED, IF_NOT_APPLICABLE, IF_RUNNING, IF_UP,
    Interface,
};
use crate::addresses;
use crate::handle::write_text;
use crate::notes::note;
use crate::real::{is_missing, real};

/// The daemon's name of a device of ours; `None`: the device is the real library's.
pub(crate) fn device_of(name: &str) -> Option<&str> {
    PREFIXES
        .iter()
        .find_map(|prefix| name.strip_prefix(prefix))
        .filter(|rest| !rest.is_empty())
}

/// `pcap_findalldevs`.
///
/// # Safety
/// `list` may be written; `errbuf` is null or points to `PCAP_ERRBUF_SIZE` bytes.
pub(crate) unsafe fn find_all(list: *mut *mut Interface, errbuf: *mut c_char) -> c_int {
    // SAFETY: the caller's promise is passed on.
    let status = unsafe {
        list.write(ptr::null_mut());
        (real().pcap_findalldevs)(list, errbuf)
    };
    if status != 0 && !is_missing() {
        return status;
    }
    let (devices, prefix) = ours();
    if status != 0 && devices.is_empty() {
        return status;
    }
    let mut end = list;
    // SAFETY: the real library's list ends with null; each node's `next` may be written.
    while let Some(node) = unsafe { (*end).as_mut() } {
        end = &raw mut node.next;
    }
    for device in &devices {
        // SAFETY: `end` is the place of the list's last null.
        let Some(node) = (unsafe { addresses::allocate::<Interface>() }) else {
            // SAFETY: the list is whole, and the caller gets none of it.
            unsafe {
                (real().pcap_freealldevs)(*list);
                list.write(ptr::null_mut());
                tell(errbuf, "out of memory");
            }
            return ERROR;
        };
        let name = plain_name(device);
        // SAFETY: a fresh node; zeros are a valid one. `end` is the list's last pointer.
        unsafe {
            (*node).name = copy(&format!("{prefix}{name}"));
            (*node).description = copy(&description(device));
            (*node).addresses = addresses::list(&device.addresses);
            (*node).flags = state_flags(device);
            *end = node;
            end = &raw mut (*node).next;
        }
    }
    // SAFETY: the list is whole now; success leaves no text.
    unsafe { tell(errbuf, "") };
    0
}

/// `pcap_freealldevs` without a real library.
///
/// # Safety
/// `list` is null or came from `find_all`, and is freed once.
pub(crate) unsafe fn free(mut list: *mut Interface) {
    while !list.is_null() {
        // SAFETY: a node of ours, made with malloc as all it points to.
        unsafe {
            let node = list.read();
            addresses::free(node.addresses);
            libc::free(node.name.cast());
            libc::free(node.description.cast());
            libc::free(list.cast());
            list = node.next;
        }
    }
}

/// Writes a text to a program's error buffer.
///
/// # Safety
/// `errbuf` is null or points to `PCAP_ERRBUF_SIZE` bytes.
pub(crate) unsafe fn tell(errbuf: *mut c_char, text: &str) {
    if !errbuf.is_null() {
        // SAFETY: the caller's promise.
        let buffer = unsafe { std::slice::from_raw_parts_mut(errbuf, ERRBUF_SIZE) };
        write_text(buffer, text.as_bytes());
    }
}

/// `pcap_lookupnet`: network and mask of a device's first IPv4 address; 0 and 0 if it has none that
/// we know, as the real library has it.
pub(crate) fn network(name: &str) -> (u32, u32) {
    let (wanted, _group) = split_group(device_of(name).unwrap_or(name));
    let wanted = wanted
        .split_once('@')
        .map_or(wanted, |(device, _queue)| device);
    let (devices, _) = ours();
    let device = devices.iter().find(|device| plain_name(device) == wanted);
    let addresses = device.into_iter().flat_map(|device| &device.addresses);
    addresses
        .filter_map(|text| match addresses::parse(text)? {
            (IpAddr::V4(address), bits) => Some(addresses::network(address, bits)),
            _ => None,
        })
        .next()
        .unwrap_or((0, 0))
}

fn plain_name(device: &Device) -> &str {
    device.name.strip_prefix("host:").unwrap_or(&device.name)
}

/// An error with its cause, on one line.
pub(crate) fn describe(error: &Error) -> String {
    match std::error::Error::source(error) {
        Some(source) => format!("{error}: {source}"),
        None => error.to_string(),
    }
}

/// The devices of the daemon or agent, and what to put before their names; none if nobody answers:
/// programs that list devices are to see those that work.
fn ours() -> (Vec<Device>, &'static str) {
    let listed = Client::connect_within(PATIENCE).and_then(|mut client| {
        let devices = client.devices()?;
        let is_host = client.server().starts_with("vnplugd");
        Ok((devices, if is_host { "vnplug:" } else { "host:" }))
    });
    if matches!(listed, Err(Error::TimedOut)) {
        static ONCE: Once = Once::new();
        note(
            &ONCE,
            "vnplug: the daemon does not answer; its devices are not listed",
        );
    }
    listed.unwrap_or_default()
}

fn description(device: &Device) -> String {
    let state = match device.state.as_str() {
        "up" => String::new(),
        state => format!(", {state}"),
    };
    match device.description.as_str() {
        "" => format!("vNPlug {}{state}", device.kind),
        text => format!("vNPlug {}: {text}{state}", device.kind),
    }
}

fn state_flags(device: &Device) -> u32 {
    let connection = match (device.kind.as_str(), device.state.as_str()) {
        ("af_packet", "up") => IF_CONNECTED,
        ("af_packet", _) => IF_DISCONNECTED,
        _ => IF_NOT_APPLICABLE,
    };
    match device.state.as_str() {
        "up" | "waiting" => IF_UP | IF_RUNNING | connection,
        _ => connection,
    }
}

/// A copy of `text` made with malloc; null without memory, which programs know as "no text".
fn copy(text: &str) -> *mut c_char {
    let bytes: Vec<u8> = text.bytes().filter(|&byte| byte != 0).collect();
    let text = CString::new(bytes).unwrap_or_default();
    // SAFETY: a string that ends with 0.
    unsafe { libc::strdup(text.as_ptr()) }
}

/// Longest wait for the list: programs ask for it also when they want a real device.
const PATIENCE: Duration = Duration::from_millis(700);
const PREFIXES: [&str; 2] = ["host:", "vnplug:"];
