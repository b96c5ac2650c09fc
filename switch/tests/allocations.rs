//! The data path asks for no memory: once its buffers are there, a turn of a switch allocates nothing, whatever its
//! ends do: frames short and long, merged, ACKs that are expanded, guests without buffers, readers that are behind.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use allocation_counter::measure;
use vnplug_path::source::{Received, wait};
use vnplug_switch::{Access, Switch, Switchboard, VhostConfig};
use vnplug_testing::{TestDir, eventually};

use self::front::{GUEST_CSUM, GUEST_TSO4, Guest, PLAIN};
use self::plain::{Client, Stream};
use self::segments::{cut, segments};
use self::served::frame;

#[expect(dead_code, reason = "for tests of what front-ends say")]
#[path = "vhost/front.rs"]
mod front;
#[expect(dead_code, reason = "for tests of these entrances alone")]
mod plain;
#[path = "vhost/segments.rs"]
mod segments;
#[expect(dead_code, reason = "for tests that look at what is captured")]
mod served;

/// A switch whose turns are watched.
struct Watched {
    board: Switchboard,
    /// Allocations in its turns.
    asked: Arc<AtomicU64>,
    turns: Arc<AtomicU64>,
    stop: Arc<AtomicBool>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Watched {
    fn new(home: &TestDir) -> Self {
        let mut config = plain::config(home);
        config.vhost = VhostConfig {
            path: Some(home.path("vhost")),
            connect: Vec::new(),
            access: Access::default(),
        };
        let (mut queue, board) = Switch::open(config).unwrap();
        let [asked, turns] = [(); 2].map(|()| Arc::new(AtomicU64::new(0)));
        let stop = Arc::new(AtomicBool::new(false));
        let (counted, turned, stopped) =
            (Arc::clone(&asked), Arc::clone(&turns), Arc::clone(&stop));
        let thread = std::thread::spawn(move || {
            let waker = rustix::event::eventfd(0, rustix::event::EventfdFlags::empty()).unwrap();
            while !stopped.load(Ordering::Relaxed) {
                let mut received = Ok(Received::Nothing);
                let of_turn = measure(|| received = queue.receive(&mut |_| {}));
                counted.fetch_add(of_turn.count_total, Ordering::Relaxed);
                turned.fetch_add(1, Ordering::Release);
                if received.unwrap() == Received::Nothing {
                    wait(&mut *queue, waker.as_fd(), Some(Duration::from_millis(5)));
                }
            }
        });
        Self {
            board,
            asked,
            turns,
            stop,
            thread: Some(thread),
        }
    }

    /// Does something twice, so that all buffers are there. How often memory was asked for the second time.
    fn twice(&self, mut act: impl FnMut()) -> u64 {
        let mut asked = 0;
        for _ in 0..2 {
            let before = self.asked();
            act();
            asked = self.asked() - before;
        }
        asked
    }

    /// So far, and in the turn that runs.
    fn asked(&self) -> u64 {
        let now = self.turns.load(Ordering::Acquire);
        eventually("a turn ends", || {
            self.turns.load(Ordering::Acquire) > now + 1
        });
        self.asked.load(Ordering::Relaxed)
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.take().unwrap().join().unwrap();
    }
}

/// Two guests that know each other's ports.
fn guests(home: &TestDir) -> [Guest; 2] {
    let mut both =
        [(); 2].map(|()| Guest::boot(&home.path("vhost"), PLAIN | GUEST_CSUM | GUEST_TSO4));
    let [one, other] = &mut both;
    one.send(&frame(2, 1, 0, 60));
    assert_eq!(other.next().1, frame(2, 1, 0, 60));
    other.send(&frame(1, 2, 0, 60));
    assert_eq!(one.next().1, frame(1, 2, 0, 60));
    both
}

/// Sends bursts of frames, and takes what comes behind each, or, as a guest that is slow, when as many bursts wait.
fn exchange(from: &mut Guest, to: &mut Guest, frames: &[Vec<u8>], behind: usize) {
    for burst in 0..BURSTS {
        from.send_all(frames);
        eventually("they were taken", || from.has_sent());
        if burst % behind < behind - 1 {
            continue;
        }
        let mut came = 0;
        while came < behind * frames.len() {
            let (header, bytes) = to.next();
            came += cut(&header, bytes).len();
        }
    }
}

#[test]
fn guests_and_their_frames() {
    for settings in ["gro=off acks=as-is", "gro=20 acks=expand"] {
        let home = TestDir::new("allocations");
        let watched = Watched::new(&home);
        let [mut one, mut other] = guests(&home);
        for port in watched.board.show().unwrap().ports {
            watched.board.set(Some(port.number), settings).unwrap();
        }
        let plain = |len| (0..AT_ONCE).map(|it| frame(2, 1, it, len)).collect();
        let all: [Vec<_>; 3] = [plain(60), plain(1_514), segments(0, AT_ONCE, 1_000)];
        // A guest has 64 buffers: eight bursts at once have to wait for some.
        for (frames, behind) in all.iter().zip([1, 1, 1]).chain(all.iter().zip([8, 4, 4])) {
            let asked = watched.twice(|| exchange(&mut one, &mut other, frames, behind));
            let len = frames[0].len();
            assert_eq!(asked, 0, "{settings}, {len} bytes, behind by {behind}");
        }
        // The control: a port that comes needs memory.
        let before = watched.asked();
        let _third = Guest::boot(&home.path("vhost"), PLAIN);
        assert!(watched.asked() > before);
    }
}

#[test]
fn a_reader_that_is_behind() {
    let home = TestDir::new("allocations");
    let watched = Watched::new(&home);
    let (sender, reader) = (Stream::join(&home), Stream::join(&home));
    reader.send(&frame(1, 2, 0, 60));
    assert_eq!(sender.next(), frame(1, 2, 0, 60));
    // More than its socket has room for: the rest waits in the switch, a hundred frames and more.
    let asked = watched.twice(|| {
        for number in 0..400 {
            sender.send(&frame(2, 1, number, 1_514));
        }
        for number in 0..400 {
            assert_eq!(reader.next(), frame(2, 1, number, 1_514));
        }
    });
    // What was kept beyond that was given back, and is asked for again, by the double.
    assert!(asked <= 8, "{asked} times");
}

const BURSTS: usize = 160;
const AT_ONCE: u32 = 32;
