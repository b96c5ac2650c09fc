//! What programs call: the functions of the kernel's that the daemon has as well.
//!
//! A helper is given numbers that a program made up. Each place is checked against the area before it is used,
//! and nothing here panics.
#![expect(
    unsafe_code,
    reason = "reads and writes the area on behalf of machine code, which calls it"
)]

use std::ptr;

use crate::check::Helper;
use crate::layout::{CONTEXT, MAX_FRAME, PACKET, ROOM, ROOM_END};

/// What machine code is called with. It reads and writes the first four fields.
#[repr(C)]
pub(crate) struct Host {
    /// Where the area begins.
    pub(crate) base: *mut u8,
    /// Instructions that may still be run.
    pub(crate) fuel: i64,
    /// Where functions of the program begin.
    pub(crate) functions: *const usize,
    /// Where helpers begin.
    pub(crate) helpers: [HelperFn; Helper::COUNT],
    /// Bytes of the area; a power of two.
    pub(crate) area: u32,
    /// Where in the area the frame begins and ends.
    pub(crate) data: u32,
    pub(crate) data_end: u32,
    /// The context is a `struct xdp_md`.
    pub(crate) is_xdp: bool,
    /// Where the frame is to be sent, and how (`bpf_redirect`).
    pub(crate) redirect: Option<(u32, u64)>,
    /// Which of the places of its own in maps per CPU it has.
    pub(crate) seat: u32,
    /// The state of its random numbers.
    pub(crate) random: u64,
    /// Its maps, by handle.
    pub(crate) maps: Vec<MapPlace>,
}

/// A map in the area.
#[derive(Debug, Clone, Copy)]
pub(crate) struct MapPlace {
    pub(crate) place: u32,
    pub(crate) stride: u32,
    pub(crate) value_bytes: u32,
    pub(crate) entries: u32,
    pub(crate) constant: bool,
}

pub(crate) type HelperFn = extern "C" fn(*mut Host, u64, u64, u64, u64, u64) -> u64;

/// By number.
pub(crate) const HELPERS: [HelperFn; Helper::COUNT] = {
    let mut table = [lookup as HelperFn; Helper::COUNT];
    table[Helper::Lookup as usize] = lookup;
    table[Helper::Update as usize] = update;
    table[Helper::Clock as usize] = clock;
    table[Helper::CoarseClock as usize] = coarse_clock;
    table[Helper::Random as usize] = random;
    table[Helper::Cpu as usize] = cpu;
    table[Helper::CsumDiff as usize] = csum_diff;
    table[Helper::Redirect as usize] = redirect;
    table[Helper::AdjustHead as usize] = adjust_head;
    table[Helper::AdjustTail as usize] = adjust_tail;
    table[Helper::LoadBytes as usize] = load_bytes;
    table[Helper::StoreBytes as usize] = store_bytes;
    table[Helper::L3Csum as usize] = l3_csum;
    table[Helper::L4Csum as usize] = l4_csum;
    table[Helper::Delete as usize] = delete;
    table[Helper::Seat as usize] = seat;
    table
};

impl Host {
    /// Reads bytes of the area into `to`; false if they do not lie there.
    pub(crate) fn read(&self, at: u64, to: &mut [u8]) -> bool {
        let Some(from) = self.place(at, to.len()) else {
            return false;
        };
        // SAFETY: as many bytes lie there, in the area, which is mapped whole while the host lives. Maps in it
        // may be written meanwhile by the kernel; a copy of bytes bears that as the kernel's own does.
        unsafe { ptr::copy_nonoverlapping(from, to.as_mut_ptr(), to.len()) };
        true
    }

    /// Writes bytes of the area; false if they do not lie there.
    pub(crate) fn write(&mut self, at: u64, from: &[u8]) -> bool {
        let Some(to) = self.place(at, from.len()) else {
            return false;
        };
        // SAFETY: as above; `from` is no part of the area, to which no reference exists while a program runs.
        unsafe { ptr::copy_nonoverlapping(from.as_ptr(), to, from.len()) };
        true
    }

    fn place(&self, at: u64, len: usize) -> Option<*mut u8> {
        let end = at.checked_add(len as u64)?;
        if end > self.area.into() {
            return None;
        }
        // SAFETY: within the area, as just checked.
        Some(unsafe { self.base.add(at as usize) })
    }

    /// Takes fuel for bytes that a helper is to touch. False: there is not so much, and it touches none; the program
    /// is stopped when the helper returns, whatever that is.
    #[must_use]
    fn pay(&mut self, bytes: u64) -> bool {
        self.fuel -= i64::try_from(bytes / 8).unwrap_or(i64::MAX / 2);
        self.fuel >= 0
    }

    /// The context's words say where the frame is now.
    pub(crate) fn tell(&mut self) {
        let (data, end) = (self.data, self.data_end);
        let words: [(u32, u32); 4] = match self.is_xdp {
            true => [(0, data), (4, end), (8, data), (8, data)],
            false => [(0, end - data), (76, data), (80, end), (140, data)],
        };
        for (at, word) in words {
            self.write((CONTEXT + at).into(), &word.to_ne_bytes());
        }
    }

    /// A place in the frame, of `len` bytes.
    fn in_frame(&self, offset: u64, len: u64) -> Option<u64> {
        let frame = u64::from(self.data_end - self.data);
        let end = (offset & 0xffff_ffff).checked_add(len)?;
        (end <= frame).then(|| u64::from(self.data) + (offset & 0xffff_ffff))
    }

    fn map(&self, handle: u64) -> Option<MapPlace> {
        let index = handle.checked_sub(FIRST_HANDLE)?;
        self.maps.get(usize::try_from(index).ok()?).copied()
    }

    fn entry(&self, map: MapPlace, key: u64) -> Option<u64> {
        let mut index = [0; 4];
        let index = self
            .read(key, &mut index)
            .then(|| u32::from_ne_bytes(index))?;
        let at = u64::from(map.place) + u64::from(index) * u64::from(map.stride);
        (index < map.entries).then_some(at)
    }
}

/// The handle of the first map. Programs cannot do anything with it but give it to helpers.
pub(crate) const FIRST_HANDLE: u64 = 0xb9f0_0000_0000_0000;

/// # Safety
/// Machine code passes on what it was called with: a host that lives, and that nobody else uses.
macro_rules! host {
    ($host:ident) => {
        // SAFETY: machine code passes on what `Instance::run` called it with: a host that it borrows
        // exclusively for as long as the call takes.
        unsafe { &mut *$host }
    };
}

extern "C" fn lookup(host: *mut Host, map: u64, key: u64, _: u64, _: u64, _: u64) -> u64 {
    let host = host!(host);
    let found = host.map(map).and_then(|map| host.entry(map, key));
    found.unwrap_or(0)
}

extern "C" fn update(host: *mut Host, map: u64, key: u64, value: u64, how: u64, _: u64) -> u64 {
    let host = host!(host);
    let Some(map) = host.map(map).filter(|map| !map.constant) else {
        return error(EINVAL);
    };
    // BPF_ANY, BPF_NOEXIST, BPF_EXIST: there is no other.
    if how > 2 {
        return error(EINVAL);
    }
    let Some(entry) = host.entry(map, key) else {
        return error(E2BIG);
    };
    // BPF_NOEXIST: all entries of an array exist.
    if how == 1 {
        return error(EEXIST);
    }
    let len = map.value_bytes as usize;
    if !host.pay(len as u64) {
        return STOPPED;
    }
    match (host.place(value, len), host.place(entry, len)) {
        (Some(from), Some(to)) => {
            // SAFETY: both lie in the area, and may overlap.
            unsafe { ptr::copy(from, to, len) };
            0
        }
        _ => error(EFAULT),
    }
}

/// Entries of arrays stay.
extern "C" fn delete(_: *mut Host, _: u64, _: u64, _: u64, _: u64, _: u64) -> u64 {
    error(EINVAL)
}

extern "C" fn seat(host: *mut Host, _: u64, _: u64, _: u64, _: u64, _: u64) -> u64 {
    host!(host).seat.into()
}

extern "C" fn clock(_: *mut Host, _: u64, _: u64, _: u64, _: u64, _: u64) -> u64 {
    now(rustix::time::ClockId::Monotonic)
}

extern "C" fn coarse_clock(_: *mut Host, _: u64, _: u64, _: u64, _: u64, _: u64) -> u64 {
    now(rustix::time::ClockId::MonotonicCoarse)
}

fn now(clock: rustix::time::ClockId) -> u64 {
    let time = rustix::time::clock_gettime(clock);
    (time.tv_sec as u64)
        .wrapping_mul(1_000_000_000)
        .wrapping_add(time.tv_nsec as u64)
}

extern "C" fn random(host: *mut Host, _: u64, _: u64, _: u64, _: u64, _: u64) -> u64 {
    let host = host!(host);
    // SplitMix64 (Steele, Lea and Flood 2014): for sampling, as the kernel's is.
    host.random = host.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut z = host.random;
    z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    (z ^ z >> 31) & 0xffff_ffff
}

extern "C" fn cpu(_: *mut Host, _: u64, _: u64, _: u64, _: u64, _: u64) -> u64 {
    rustix::thread::sched_getcpu() as u64
}

/// `bpf_csum_diff`: the ones' complement sum, not folded, of `to` less `from`, and of the seed.
extern "C" fn csum_diff(
    host: *mut Host,
    from: u64,
    from_len: u64,
    to: u64,
    to_len: u64,
    seed: u64,
) -> u64 {
    let host = host!(host);
    if (from_len | to_len) & 3 != 0 || from_len.saturating_add(to_len) > 512 {
        return error(EINVAL);
    }
    // An instruction for each byte: it reads four at a time, and checks each place.
    if !host.pay(8 * (from_len + to_len)) {
        return STOPPED;
    }
    let mut sum = seed & 0xffff_ffff;
    for (at, len, invert) in [(from, from_len, true), (to, to_len, false)] {
        for step in (0..len).step_by(4) {
            let mut word = [0; 4];
            if !host.read(at.wrapping_add(step), &mut word) {
                return error(EFAULT);
            }
            let word = u32::from_ne_bytes(word);
            sum += u64::from(if invert { !word } else { word });
        }
    }
    while sum >> 32 != 0 {
        sum = (sum & 0xffff_ffff) + (sum >> 32);
    }
    // Since Linux 6.13 the kernel folds it to 16 bits (commit 6a4794d5a3e2); programs fold it either way.
    u64::from(fold(sum))
}

fn fold(mut sum: u64) -> u16 {
    while sum >> 16 != 0 {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    sum as u16
}

extern "C" fn redirect(host: *mut Host, to: u64, how: u64, _: u64, _: u64, _: u64) -> u64 {
    let host = host!(host);
    host.redirect = Some((to as u32, how));
    match host.is_xdp {
        true => XDP_REDIRECT,
        false => TC_ACT_REDIRECT,
    }
}

extern "C" fn adjust_head(host: *mut Host, _: u64, delta: u64, _: u64, _: u64, _: u64) -> u64 {
    let host = host!(host);
    let data = i64::from(host.data) + i64::from(delta as i32);
    if data < ROOM.into() || data > i64::from(host.data_end) - ETHERNET {
        return error(EINVAL);
    }
    host.data = data as u32;
    host.tell();
    0
}

extern "C" fn adjust_tail(host: *mut Host, _: u64, delta: u64, _: u64, _: u64, _: u64) -> u64 {
    let host = host!(host);
    let end = i64::from(host.data_end) + i64::from(delta as i32);
    if end > ROOM_END.into()
        || end > (PACKET + MAX_FRAME).into()
        || end < i64::from(host.data) + ETHERNET
    {
        return error(EINVAL);
    }
    let grown = u64::from(host.data_end);
    if !host.pay(8 * (end.max(0) as u64).saturating_sub(grown)) {
        return STOPPED;
    }
    for at in grown..end.max(0) as u64 {
        host.write(at, &[0]);
    }
    host.data_end = end as u32;
    host.tell();
    0
}

extern "C" fn load_bytes(host: *mut Host, _: u64, offset: u64, to: u64, len: u64, _: u64) -> u64 {
    let host = host!(host);
    let from = host
        .in_frame(offset, len)
        .and_then(|at| host.place(at, len as usize));
    match (from, host.place(to, len as usize)) {
        (Some(from), Some(to)) => {
            if !host.pay(len) {
                return STOPPED;
            }
            // SAFETY: both lie in the area, and may overlap.
            unsafe { ptr::copy(from, to, len as usize) };
            0
        }
        _ => error(EFAULT),
    }
}

extern "C" fn store_bytes(
    host: *mut Host,
    _: u64,
    offset: u64,
    from: u64,
    len: u64,
    _: u64,
) -> u64 {
    let host = host!(host);
    let to = host
        .in_frame(offset, len)
        .and_then(|at| host.place(at, len as usize));
    match (host.place(from, len as usize), to) {
        (Some(from), Some(to)) => {
            if !host.pay(len) {
                return STOPPED;
            }
            // SAFETY: both lie in the area, and may overlap.
            unsafe { ptr::copy(from, to, len as usize) };
            0
        }
        _ => error(EFAULT),
    }
}

/// `bpf_l3_csum_replace`: a field changed from one value to another; the sum lies at `offset`.
extern "C" fn l3_csum(host: *mut Host, _: u64, offset: u64, from: u64, to: u64, how: u64) -> u64 {
    replace(host!(host), offset, from, to, how)
}

/// `bpf_l4_csum_replace`: as that; a UDP sum of 0 stays, and none becomes 0 if `BPF_F_MARK_MANGLED_0` is there.
extern "C" fn l4_csum(host: *mut Host, _: u64, offset: u64, from: u64, to: u64, how: u64) -> u64 {
    replace(host!(host), offset, from, to, how)
}

fn replace(host: &mut Host, offset: u64, from: u64, to: u64, how: u64) -> u64 {
    const MARK_MANGLED_0: u64 = 1 << 5;
    let Some(at) = host.in_frame(offset, 2) else {
        return error(EFAULT);
    };
    let mut old = [0; 2];
    host.read(at, &mut old);
    let old = u16::from_ne_bytes(old);
    if how & MARK_MANGLED_0 != 0 && old == 0 {
        return 0;
    }
    // RFC 1624: HC' = ~(~HC + ~m + m').
    let added = match how & 0xf {
        0 => to & 0xffff_ffff,
        2 => (to & 0xffff) + u64::from(!(from as u16)),
        4 => (to & 0xffff_ffff) + u64::from(!(from as u32)),
        _ => return error(EINVAL),
    };
    let mut new = !fold(u64::from(!old) + added);
    if how & MARK_MANGLED_0 != 0 && new == 0 {
        new = 0xffff;
    }
    host.write(at, &new.to_ne_bytes());
    0
}

/// Negative, as the kernel has it.
fn error(number: i64) -> u64 {
    number.wrapping_neg().cast_unsigned()
}

/// What a helper returns without the fuel for what it was to do: nobody sees it.
const STOPPED: u64 = 0;
const E2BIG: i64 = 7;
const EFAULT: i64 = 14;
const EEXIST: i64 = 17;
const EINVAL: i64 = 22;
const XDP_REDIRECT: u64 = 4;
const TC_ACT_REDIRECT: u64 = 7;
/// Bytes of an Ethernet header (`ETH_HLEN`): what must be left of a frame.
const ETHERNET: i64 = 14;

impl std::fmt::Debug for Host {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Host")
            .field("area", &self.area)
            .field("maps", &self.maps)
            .finish_non_exhaustive()
    }
}
