//! One instance of a program in the daemon, for one thread.
#![expect(unsafe_code, reason = "calls machine code that we generated")]

use std::io;
use std::sync::Arc;

use crate::area::Area;
use crate::check::Context;
use crate::code::Code;
use crate::helpers::{HELPERS, Host};
use crate::layout::{CONTEXT, MAX_FRAME, PACKET, STACK_END};
use crate::per_cpu::{Seat, Seats};

/// `fn(host, frame pointer, r1, …, r5) -> r0`.
type Entry = unsafe extern "C" fn(*mut Host, u64, u64, u64, u64, u64, u64) -> u64;

/// A program, and the memory that it may reach.
#[derive(Debug)]
pub struct Instance {
    area: Area,
    host: Host,
    entry: Entry,
    code: Arc<Code>,
    aborted: u64,
    _seat: Option<Seat>,
}

/// What a program is told of a frame beside its bytes.
#[derive(Debug, Clone, Copy, Default)]
pub struct Meta {
    /// Number of the interface that it came from (`ingress_ifindex`, `ifindex`).
    pub interface: u32,
    /// The receive queue (`rx_queue_index`, `queue_mapping`).
    pub queue: u32,
    /// Its length on the wire, if only its begin is here (`wire_len`).
    pub wire_len: u32,
    /// Its flow hash (`hash`).
    pub hash: u32,
}

/// What a program made of a frame.
#[derive(Debug, Clone, Copy)]
pub struct Run<'a> {
    /// What it returned; `None` if it was stopped before it did.
    pub verdict: Option<i32>,
    /// The frame as it is now.
    pub frame: &'a [u8],
    /// The interface that it said it should be sent to (`bpf_redirect`).
    pub redirect: Option<u32>,
}

/// Instructions that a program may run for one frame beyond those it has once, with what helpers cost: some 50
/// microseconds, as 256 frames are a turn of a thread that others wait for.
const FUEL: i64 = 1 << 17;

impl Instance {
    /// An instance of this program.
    ///
    /// # Errors
    /// The system's: no memory.
    pub fn new(code: &Arc<Code>) -> io::Result<Self> {
        let maps = code.places.iter().copied().zip(&code.maps);
        let area = Area::new(code.area, maps)?;
        let seat = code.seats.as_ref().map(Seats::take).transpose()?;
        let first = code.functions.first().copied().unwrap_or_default();
        let host = Host {
            base: area.base(),
            fuel: 0,
            functions: code.functions.as_ptr(),
            helpers: HELPERS,
            area: code.area,
            data: PACKET,
            data_end: PACKET,
            is_xdp: code.context == Context::Xdp,
            redirect: None,
            random: vnplug_os::event::random(),
            seat: seat.as_ref().map_or(0, |seat| seat.number),
            maps: code.map_places(),
        };
        Ok(Self {
            area,
            host,
            // SAFETY: the translator made the first function of this type, and a program has one.
            entry: unsafe { std::mem::transmute::<usize, Entry>(first) },
            code: Arc::clone(code),
            aborted: 0,
            _seat: seat,
        })
    }

    /// Runs it on a frame; one of more than 68 KiB has no verdict.
    #[inline]
    pub fn run(&mut self, frame: &[u8], meta: &Meta) -> Run<'_> {
        if frame.len() > MAX_FRAME as usize {
            self.aborted += 1;
            return Run {
                verdict: None,
                frame: &[],
                redirect: None,
            };
        }
        let end = PACKET + frame.len() as u32;
        self.area.bytes_mut(PACKET, end).copy_from_slice(frame);
        (self.host.data, self.host.data_end) = (PACKET, end);
        self.host.fuel = FUEL;
        self.host.redirect = None;
        self.describe(frame, meta);
        // SAFETY: the code is what the translator made of a program; it reads and writes the host's first
        // fields and the area, which is mapped whole, and returns. `code` keeps it, and this borrows host and
        // area exclusively. Helpers use the host by the same pointer, while no reference of ours is in use.
        let result = unsafe {
            (self.entry)(
                &raw mut self.host,
                STACK_END.into(),
                CONTEXT.into(),
                0,
                0,
                0,
                0,
            )
        };
        let ended = self.host.fuel >= 0;
        self.aborted += u64::from(!ended);
        Run {
            verdict: ended.then_some(result as i32),
            frame: self.area.bytes(self.host.data, self.host.data_end),
            redirect: self.host.redirect.map(|(to, _)| to),
        }
    }

    /// Frames for which it was stopped, as it did not end.
    pub fn aborted(&self) -> u64 {
        self.aborted
    }

    /// The program.
    pub fn code(&self) -> &Arc<Code> {
        &self.code
    }

    /// Fills the context.
    #[inline]
    fn describe(&mut self, frame: &[u8], meta: &Meta) {
        let (data, end) = (self.host.data, self.host.data_end);
        let context = self.area.bytes_mut(CONTEXT, CONTEXT + SK_BUFF);
        let mut put = |at: usize, word: u32| {
            context[at..at + 4].copy_from_slice(&word.to_ne_bytes());
        };
        match self.host.is_xdp {
            // struct xdp_md: data, data_end, data_meta, ingress_ifindex, rx_queue_index, egress_ifindex.
            true => {
                let words = [data, end, data, meta.interface, meta.queue, 0];
                for (place, word) in words.into_iter().enumerate() {
                    put(place * 4, word);
                }
            }
            // struct __sk_buff (include/uapi/linux/bpf.h); what is not named is 0.
            false => {
                let [first, second] = frame.get(12..14).map_or([0, 0], |it| [it[0], it[1]]);
                let protocol = u32::from(u16::from_ne_bytes([first, second]));
                for at in (0..SK_BUFF as usize).step_by(4) {
                    put(at, 0);
                }
                for (at, word) in [
                    (0, end - data),
                    (12, meta.queue),
                    (16, protocol),
                    (36, meta.interface),
                    (40, meta.interface),
                    (68, meta.hash),
                    (76, data),
                    (80, end),
                    (140, data),
                    (160, meta.wire_len),
                ] {
                    put(at, word);
                }
            }
        }
    }

    /// Reads from the values of a map, by its place among the program's; false if they do not lie there.
    pub fn read_map(&self, map: usize, offset: u64, to: &mut [u8]) -> bool {
        let Some(place) = self.host.maps.get(map) else {
            return false;
        };
        let len = u64::from(place.stride) * u64::from(place.entries);
        let inside = offset
            .checked_add(to.len() as u64)
            .is_some_and(|end| end <= len);
        inside && self.area.read(u64::from(place.place) + offset, to)
    }
}

// SAFETY: the pointers lead into the area and the code, which it keeps; who holds it uses it alone.
unsafe impl Send for Instance {}

/// Bytes of `struct __sk_buff`.
const SK_BUFF: u32 = 192;
