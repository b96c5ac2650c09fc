//! Before the capture: what a program may set, and what activation makes of it.

use std::ffi::c_int;
use std::time::Duration;

use vnplug::{Direction, Error, Port, PortOptions, code, split_group};
use vnplug_ring::layout::record_size;

use crate::abi::{
    ERROR, ERROR_ACTIVATED, ERROR_NO_SUCH_DEVICE, ERROR_PERM_DENIED, ERROR_RFMON_NOTSUP,
    ERROR_TSTAMP_PRECISION_NOTSUP, PRECISION_MICRO, PRECISION_NANO, TSTAMP_HOST,
    WARNING_TSTAMP_TYPE_NOTSUP,
};
use crate::devices::{describe, device_of};
use crate::filter::{INTERRUPTED, fail};
use crate::handle::{Handle, HandleState};
use crate::read::Live;

/// What was set.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Options {
    /// 0 and less, and too much: the longest there is.
    pub(crate) snaplen: c_int,
    /// Milliseconds; 0 = the library's choice, less = never wait.
    pub(crate) timeout_ms: c_int,
    pub(crate) immediate: bool,
    /// Packets slept for; 0 = the library's choice.
    pub(crate) watermark: u32,
    pub(crate) rfmon: bool,
    /// Bytes; 0 = the daemon's choice.
    pub(crate) buffer_bytes: c_int,
    pub(crate) nanoseconds: bool,
    /// An Ethernet protocol; 0 = all.
    pub(crate) protocol: c_int,
    pub(crate) nonblock: bool,
}

/// Sets an option; refused after activation.
pub(crate) fn set(handle: &Handle, set: impl FnOnce(&mut Options)) -> c_int {
    let activated = handle.with(|state| {
        if state.live.is_some() {
            return true;
        }
        set(&mut state.options);
        false
    });
    if activated != Some(false) {
        handle.set_error("can't perform  operation on activated capture");
        return ERROR_ACTIVATED;
    }
    0
}

/// `pcap_set_tstamp_type`: the daemon's time stamps are the host's; where its NIC takes them, that
/// is the operator's choice.
pub(crate) fn set_tstamp_type(handle: &Handle, kind: c_int) -> c_int {
    match set(handle, |_| ()) {
        0 if kind == TSTAMP_HOST => 0,
        0 => {
            // Programs warn and go on, as on an interface with one kind of time stamps.
            handle.set_error(
                "the time stamps are the daemon's, taken by its host; the program cannot set how",
            );
            WARNING_TSTAMP_TYPE_NOTSUP
        }
        status => status,
    }
}

/// `pcap_set_tstamp_precision`.
pub(crate) fn set_precision(handle: &Handle, precision: c_int) -> c_int {
    match precision {
        PRECISION_MICRO | PRECISION_NANO => set(handle, |options| {
            options.nanoseconds = precision == PRECISION_NANO
        }),
        _ => match set(handle, |_| ()) {
            0 => {
                handle.set_error("time stamps are of microseconds or nanoseconds");
                ERROR_TSTAMP_PRECISION_NOTSUP
            }
            status => status,
        },
    }
}

/// `pcap_set_watermark` of PF_RING's libpcap: packets that a waiting program sleeps for; 0 = 1. Before
/// activation or after it, where it counts from the next wait on.
pub(crate) fn set_watermark(handle: &Handle, packets: u32) -> c_int {
    handle.with(|state| {
        state.options.watermark = packets.max(1);
        let options = state.options;
        if let Some(live) = &mut state.live {
            let (watermark, delay) = sleep(options, live.port.ring_bytes(), live.snaplen);
            live.port.set_watermark(watermark, delay);
        }
    });
    0
}

/// `pcap_set_application_name` of PF_RING's libpcap: what the operator sees. A port that is open keeps
/// the name that it has.
pub(crate) fn set_name(handle: &Handle, name: &str) -> c_int {
    let name: String = name.chars().take(MAX_NAME).collect();
    handle.with(|state| state.label = format!("{name}[{}]", std::process::id()));
    0
}

/// `pcap_activate`: 0, or an error whose text is set.
pub(crate) fn activate(handle: &Handle) -> c_int {
    match set(handle, |_| ()) {
        0 => {}
        status => return status,
    }
    let name = handle.name.to_string_lossy();
    match handle.with(|state| open(&name, handle.number, state)) {
        Some(Ok(())) => {
            handle.set_active();
            0
        }
        Some(Err((status, text))) => {
            handle.set_error(&text);
            status
        }
        None => fail(handle, INTERRUPTED),
    }
}

fn open(name: &str, number: u64, state: &mut HandleState) -> Result<(), (c_int, String)> {
    let options = state.options;
    if options.rfmon {
        let text = "vNPlug devices have no monitor mode: set it on the host's interface";
        return Err((ERROR_RFMON_NOTSUP, text.into()));
    }
    if !matches!(options.protocol, 0 | ETH_P_ALL) {
        let text = "vNPlug devices capture every protocol: use a filter, as \"ether proto 0x800\"";
        return Err((ERROR, text.into()));
    }
    let device = device_of(name).unwrap_or(name);
    let snaplen = match options.snaplen {
        bytes if (1..MAX_SNAPLEN).contains(&bytes) => bytes,
        _ => MAX_SNAPLEN,
    };
    let opened = port((device, number), snaplen, options, &state.label);
    let mut port = opened.map_err(|error| refusal(&error))?;
    let (watermark, delay) = sleep(options, port.ring_bytes(), snaplen);
    port.set_watermark(watermark, delay);
    // From now on the descriptor tells the truth.
    port.settle().map_err(|error| refusal(&error))?;
    state.live = Some(Box::new(Live::new(port, snaplen, options)));
    Ok(())
}

/// Opens the port; a ring that is larger than the operator allows, or the machine can give, is
/// tried smaller, as libpcap does. In a group the program's buffer is the arena: the first member
/// says how large it is, and the daemon how many descriptors each has.
fn port(
    (device, number): (&str, u64),
    snaplen: c_int,
    options: Options,
    label: &str,
) -> Result<Port, Error> {
    let (device, group) = split_group(device);
    let mut request = PortOptions::new(device)
        .direction(Direction::Both)
        .handle(number);
    if !label.is_empty() {
        request = request.label(label);
    }
    let sized = |request: PortOptions, bytes: u64| match group {
        "" => request.ring_bytes(bytes),
        group => request.group(group).arena_bytes(bytes),
    };
    let bytes = |number: c_int| u64::from(number.unsigned_abs());
    let mut ring = bytes(options.buffer_bytes.max(0));
    let cut = if snaplen < MAX_SNAPLEN {
        let least = 4 * record_size(snaplen.unsigned_abs());
        ring = if ring == 0 { 0 } else { ring.max(least) };
        snaplen.unsigned_abs()
    } else {
        0
    };
    loop {
        let opened = sized(request.clone().snaplen(cut), ring).open();
        let too_large = matches!(
            &opened,
            Err(Error::Refused { code, .. })
                if matches!(*code, code::INVALID | code::NO_MEMORY | code::LIMIT)
        );
        match ring {
            _ if !too_large => return opened,
            // The daemon's own choice does not hold a packet of this snaplen.
            0 if cut > 0 => ring = 4 * record_size(cut),
            ring if ring <= LEAST_RING => return opened,
            _ => ring /= 2,
        }
    }
}

/// How many packets the reader sleeps for, and how long at most.
fn sleep(options: Options, ring_bytes: u64, snaplen: c_int) -> (u32, Duration) {
    let delay = match options.timeout_ms {
        ms if ms > 0 => Duration::from_millis(u64::from(ms.unsigned_abs())),
        _ => DEFAULT_DELAY,
    };
    if options.watermark > 0 {
        return (options.watermark, delay);
    }
    if options.immediate {
        return (1, delay);
    }
    // The host wakes the program when half of the ring is unread, too, and in a group when half of
    // the arena was overwritten, so longer frames are no danger.
    let packets = ring_bytes / 4 / record_size(snaplen.unsigned_abs().min(SHORT_FRAME));
    (packets.clamp(1, MOST_PACKETS) as u32, delay)
}

/// The status that libpcap has for why a port was not opened, and the text.
fn refusal(error: &Error) -> (c_int, String) {
    let status = match error {
        Error::Permission { .. } => ERROR_PERM_DENIED,
        Error::Refused { code, .. } if *code == code::DENIED => ERROR_PERM_DENIED,
        Error::Refused { code, .. } if *code == code::NOT_FOUND => ERROR_NO_SUCH_DEVICE,
        _ => ERROR,
    };
    (status, describe(error))
}

/// libpcap's `MAXIMUM_SNAPLEN`.
pub(crate) const MAX_SNAPLEN: c_int = 262_144;
/// The shortest Ethernet frames there are.
const SHORT_FRAME: u32 = 60;
/// Packets slept for at most: more saves nothing.
const MOST_PACKETS: u64 = 4096;
/// A ring is not tried smaller than this.
const LEAST_RING: u64 = 1 << 18;
/// `to_ms` 0 leaves the time to the library; the kernel takes 8 ms.
const DEFAULT_DELAY: Duration = Duration::from_millis(10);
/// Characters of a program's name that are kept.
const MAX_NAME: usize = 64;
/// Every protocol.
const ETH_P_ALL: c_int = 3;
