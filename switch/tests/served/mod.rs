//! A switch that a thread of the test serves.

use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use vnplug_path::source::{Queue, Received, wait};
use vnplug_switch::{Switch, SwitchConfig, Switchboard};

/// A switch that is served until this is dropped.
pub(crate) struct Served {
    stop: Arc<AtomicBool>,
    /// What was captured on it.
    pub(crate) seen: Arc<Mutex<Vec<Vec<u8>>>>,
    counters: Arc<Mutex<Vec<(String, u64)>>>,
    thread: Option<JoinHandle<()>>,
}

impl Served {
    pub(crate) fn new(config: SwitchConfig) -> (Self, Switchboard) {
        let (mut queue, board) = Switch::open(config).unwrap();
        let stop = Arc::new(AtomicBool::new(false));
        let (seen, counters) = (Arc::default(), Arc::default());
        let (stopped, all, told) = (Arc::clone(&stop), Arc::clone(&seen), Arc::clone(&counters));
        let thread = std::thread::spawn(move || serve(&mut *queue, &stopped, &all, &told));
        let served = Self {
            stop,
            seen,
            counters,
            thread: Some(thread),
        };
        (served, board)
    }

    /// A counter, now.
    pub(crate) fn count(&self, name: &str) -> u64 {
        let counters = self.counters.lock().unwrap();
        counters
            .iter()
            .find(|(key, _)| key == name)
            .map_or(0, |it| it.1)
    }

    pub(crate) fn check_sums(&self) {
        let counters = self.counters.lock().unwrap();
        let sum = |is: &dyn Fn(&str) -> bool| -> u64 {
            let of = counters.iter().filter(|(name, _)| is(name));
            of.map(|(_, value)| value).sum()
        };
        let fates = ["unicast", "flooded", "consumed"];
        let is_fate = |name: &str| fates.contains(&name) || name.starts_with("in_dropped_");
        assert_eq!(sum(&|name| name == "entered"), sum(&is_fate));
        let is_copy = |name: &str| name == "out_enqueued" || name.starts_with("out_dropped_");
        assert_eq!(sum(&|name| name == "due"), sum(&is_copy));
    }
}

fn serve(
    queue: &mut dyn Queue,
    stop: &AtomicBool,
    seen: &Mutex<Vec<Vec<u8>>>,
    counters: &Mutex<Vec<(String, u64)>>,
) {
    let waker = rustix::event::eventfd(0, rustix::event::EventfdFlags::empty()).unwrap();
    while !stop.load(Ordering::Relaxed) {
        let mut seen = seen.lock().unwrap();
        let received = queue.receive(&mut |frames| {
            seen.extend(frames.iter().map(|frame| frame.bytes.to_vec()));
        });
        drop(seen);
        *counters.lock().unwrap() = queue.own_counters();
        if received.unwrap() == Received::Nothing {
            wait(queue, waker.as_fd(), Some(Duration::from_millis(20)));
        }
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.take().unwrap().join().unwrap();
    }
}

/// A frame of `len` bytes that says which it is.
pub(crate) fn frame(to: u8, from: u8, number: u32, len: usize) -> Vec<u8> {
    let mut frame = vec![2, 0, 0, 0, 0, to, 2, 0, 0, 0, 0, from, 0x88, 0xb5];
    frame.extend(number.to_be_bytes());
    frame.resize(len, 0xa5);
    frame
}

/// The address of a station that nobody is.
pub(crate) const ALL: u8 = 0xfe;
