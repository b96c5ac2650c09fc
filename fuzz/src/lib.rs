//! Bytes that a stranger controls, and what must hold whatever they are.
//!
//! Each module is one target: its `check` takes any bytes and panics if a promise is broken. The
//! programs in `src/bin` hand them to libFuzzer.

pub mod control;
pub mod dhcp;
pub mod direct;
pub mod filter;
pub mod hello;
pub mod intake;
mod libpcap;
pub mod names;
pub mod object;
pub mod offloads;
pub mod pcap;
pub mod pcapng;
pub mod quic;
pub mod rules;
pub mod segment;
pub mod settings;
pub mod tunnels;
pub mod twin;

/// Takes decisions from the bytes; zeros when they are used up, so that every input is a whole one.
struct Dice<'a>(&'a [u8]);

impl<'a> Dice<'a> {
    fn byte(&mut self) -> u8 {
        match self.0 {
            [first, rest @ ..] => {
                self.0 = rest;
                *first
            }
            [] => 0,
        }
    }

    fn u16(&mut self) -> u16 {
        u16::from_le_bytes([self.byte(), self.byte()])
    }

    fn u32(&mut self) -> u32 {
        u32::from(self.u16()) | u32::from(self.u16()) << 16
    }

    fn u64(&mut self) -> u64 {
        u64::from(self.u32()) | u64::from(self.u32()) << 32
    }

    fn bytes(&mut self, len: usize) -> &'a [u8] {
        let (taken, rest) = self.0.split_at(len.min(self.0.len()));
        self.0 = rest;
        taken
    }

    fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}
