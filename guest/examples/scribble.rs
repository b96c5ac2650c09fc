//! A sender that lies, for tests of what a daemon bears from a guest: it posts places that are not its own, overlap and are used
//! again, and writes over all of it meanwhile.
//!
//! ```text
//! scribble host:eth1 20000 places 0     places and stations are written over; records have no bytes of their own
//! scribble host:eth1 20000 places 32    the same, with 32 bytes of their own
//! scribble host:eth1 20000 all 0        anything of the transmit ring is
//! ```
//!
//! It begins when its receive ring is full, and says at the end how many records it posted, how many bytes of others' secrets it
//! saw in the memory of its machine, and how its ring is.

use std::error::Error;
use std::io::Write;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{scope, sleep, yield_now};
use std::time::{Duration, Instant};

use vnplug::agent::AgentConfig;
use vnplug_e2e::raw::{Raw, open};
use vnplug_ring::control::{FilterSpec, Message, Open, Opened};
use vnplug_ring::layout::{DATA_OFFSET, HEAD, Life, Place, RECORD_HEADER, TAIL, record_size};
use vnplug_ring::{Producer, Region};
use vnplug_testing::Dice;

/// The station that it is, and one that it is not.
const OWN: [u8; 6] = [2, 0, 0, 0, 0, 1];
const FOREIGN: [u8; 6] = [2, 0, 0, 0, 0, 0xee];
/// Of the one to whom it sends.
const LAST: [u8; 6] = [2, 0, 0, 0, 0, 3];
/// What only others have, many times in a row.
const SECRET: [u8; 64] = [0x5e; 64];
const RECEIVES: u64 = 1 << 16;
const SENDS: u64 = 1 << 15;
/// Of a posted record: how many bytes lie at its place, and where that is.
const PLACE_LEN: u64 = 4;
const PLACE_AT: u64 = 8;
/// How long it goes on with a ring that takes nothing.
const PATIENCE: Duration = Duration::from_secs(20);

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// What it maps.
struct Mapped {
    pool: Region,
    sends: Region,
    /// The record area that its places may name, and where that lies in the pool.
    area: Region,
    begin: u64,
    /// Frames of its own there.
    frames: Vec<u64>,
    /// Others' secrets, as places of its area.
    secrets: Vec<u64>,
}

fn main() -> Result<()> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let [device, count, what, own] = &words[..] else {
        return Err("scribble DEVICE COUNT places|all BYTES".into());
    };
    let (count, own): (u64, usize) = (count.parse()?, own.parse()?);
    let mut raw = Raw::greeted(&AgentConfig::default().socket);
    let request = Message::Open(Open {
        transmit_bytes: SENDS,
        posts: true,
        filter: FilterSpec::Expression("ether proto 0x88b5".into()),
        ..open(device, RECEIVES)
    });
    let opened = match raw.ask(&request, 0) {
        Message::Opened(opened) => opened,
        other => return Err(format!("no port but {other:?}").into()),
    };
    let fds = raw.take_fds();
    let (memory, kicks) = fds.first().zip(fds.last()).ok_or("no descriptors")?;
    let pool = vnplug::map_memory(memory.as_fd(), opened.map_len)?;
    let mapped = Mapped::of(pool, &opened)?;
    let mut kicks = UnixStream::from(kicks.try_clone()?);
    let ring = Producer::attach(mapped.sends.clone())?;
    let over = AtomicBool::new(false);
    let (posted, life) = scope(|threads| {
        threads.spawn(|| {
            let mut dice = Dice(11);
            while !over.load(Ordering::Relaxed) {
                match what.as_str() {
                    "all" => mapped.spoil(&mut dice),
                    _ => mapped.write_over(own, &mut dice),
                }
            }
        });
        let posted = mapped.posts(ring, (count, own), &mut kicks);
        over.store(true, Ordering::Relaxed);
        posted
    });
    let secrets = mapped.secrets.len() * SECRET.len();
    println!("{{\"posted\":{posted},\"secrets\":{secrets},\"life\":\"{life:?}\"}}");
    Ok(())
}

impl Mapped {
    /// Waits until its ring is full of frames, and looks for what others have.
    fn of(pool: Region, opened: &Opened) -> Result<Self> {
        let part = |offset, len| pool.part(offset, len).ok_or("a place outside the pool");
        let sends = part(opened.transmit.offset, opened.transmit.len)?;
        let begin = opened.rings[0].offset + DATA_OFFSET;
        let area = part(begin, opened.rings[0].len - DATA_OFFSET)?;
        let header = [&LAST[..], &OWN].concat();
        let until = Instant::now() + PATIENCE;
        let frames = loop {
            let frames = found(&area, &header);
            // It gives nothing back.
            if frames.len() >= 30 {
                break frames;
            }
            if Instant::now() > until {
                return Err(format!("{} frames came", frames.len()).into());
            }
            sleep(Duration::from_millis(20));
        };
        let secrets = found(&pool, &SECRET);
        let secrets = secrets.into_iter().map(|at| at.wrapping_sub(begin));
        let secrets = secrets.collect();
        Ok(Self {
            pool,
            sends,
            area,
            begin,
            frames,
            secrets,
        })
    }

    /// A place: a frame of its own, others' secrets, or anything near or far.
    fn place(&self, dice: &mut Dice) -> Place {
        let area = self.area.len();
        let any = |dice: &mut Dice, all: &[u64]| {
            all.get(dice.below(all.len().max(1) as u64) as usize)
                .copied()
        };
        let at = match dice.below(8) {
            0 => any(dice, &self.secrets).unwrap_or(area),
            1 => area - dice.below(128),
            2 => dice.below(self.pool.len()).wrapping_sub(self.begin),
            3 => 1 << dice.below(64),
            4 => dice.below(area),
            _ => any(dice, &self.frames).unwrap_or_default(),
        };
        let len = match dice.below(8) {
            0 => u32::MAX - dice.below(128) as u32,
            1 => dice.below(1 << 12) as u32,
            _ => 128,
        };
        let ring = match dice.below(16) {
            0 => 1 + dice.below(1 << 15) as u16,
            _ => 0,
        };
        Place { ring, at, len }
    }

    /// Posts `count`, each with `own` bytes of its own, unless its ring is over before: how many, and how the ring is.
    fn posts(
        &self,
        mut ring: Producer,
        (count, own): (u64, usize),
        kicks: &mut UnixStream,
    ) -> (u64, Life) {
        let mut head = [&LAST[..], &OWN, &[0x88, 0xb5]].concat();
        head.resize(head.len().max(own), 7);
        let mut dice = Dice(7);
        let (mut posted, mut until) = (0, Instant::now() + PATIENCE);
        while posted < count && ring.life() == Life::Open && Instant::now() < until {
            match ring.push_posted(0, &head[..own], self.place(&mut dice)) {
                Ok(true) => {
                    posted += 1;
                    until = Instant::now() + PATIENCE;
                    if posted % 32 != 0 {
                        continue;
                    }
                }
                Ok(false) => yield_now(),
                // It wrote over that itself: how the ring is the host says.
                Err(_) => sleep(Duration::from_millis(10)),
            }
            ring.publish();
            // It may be kicked already.
            let _ = kicks.write(&[1]);
        }
        ring.publish();
        // Until all of it is taken.
        let word = |at| self.sends.load_u64(at, Ordering::Acquire);
        while word(TAIL) != word(HEAD) && ring.life() == Life::Open && Instant::now() < until {
            let _ = kicks.write(&[1]);
            sleep(Duration::from_millis(10));
        }
        (posted, ring.life())
    }

    /// Writes over a place of a record, or over a station: of a record, or where a place may be.
    fn write_over(&self, own: usize, dice: &mut Dice) {
        let size = record_size(own as u32);
        let record = DATA_OFFSET + dice.below((self.sends.len() - DATA_OFFSET) / size) * size;
        let station = [&OWN, &FOREIGN][dice.below(2) as usize];
        match dice.below(4) {
            0 => {
                let at = self.place(dice).at;
                self.sends
                    .store_u64(record + PLACE_AT, at, Ordering::Relaxed);
            }
            1 => {
                let len = self.place(dice).len;
                self.sends
                    .store_u32(record + PLACE_LEN, len, Ordering::Relaxed);
            }
            2 if own > 0 => self.sends.write(record + RECORD_HEADER + 6, station),
            _ => {
                let frame = self.frames[dice.below(self.frames.len() as u64) as usize];
                self.area.write(frame + 6, station);
            }
        }
    }

    /// Writes anything anywhere in its transmit ring.
    fn spoil(&self, dice: &mut Dice) {
        let at = dice.below(self.sends.len() / 8) * 8;
        let value = match dice.below(3) {
            0 => 0,
            1 => dice.below(1 << 17),
            _ => u64::MAX / (1 + dice.below(1 << 20)),
        };
        self.sends.store_u64(at, value, Ordering::Relaxed);
    }
}

/// Where these bytes begin in a memory, at multiples of 8.
fn found(memory: &Region, wanted: &[u8]) -> Vec<u64> {
    const AT_ONCE: u64 = 1 << 16;
    let mut all = Vec::new();
    for from in (0..memory.len()).step_by(AT_ONCE as usize) {
        let len = (AT_ONCE + wanted.len() as u64).min(memory.len() - from);
        let mut bytes = vec![0; len as usize];
        memory.read(from, &mut bytes);
        let begins = (0..bytes.len().min(AT_ONCE as usize)).step_by(8);
        let begins = begins.filter(|at| bytes[*at..].starts_with(wanted));
        all.extend(begins.map(|at| from + at as u64));
    }
    all
}
