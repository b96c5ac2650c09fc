//! A thread that hangs is waited for by nobody, and the service manager hears of it.

use std::io::Read;
use std::os::unix::net::{UnixDatagram, UnixStream};

use rustix::event::epoll::EventFlags;
use vnplug_os::service::Manager;
use vnplug_path::engine::Pulse;
use vnplug_switch::{Switch, SwitchConfig};
use vnplug_testing::TestDir;

use super::*;

/// A queue whose thread hangs in `receive` while it is told to; without another one it has frames all the time.
struct Hanging {
    hangs: Arc<Hangs>,
    of: Option<Box<dyn Queue>>,
}

#[derive(Default)]
struct Hangs {
    told: AtomicBool,
    does: AtomicBool,
}

impl Hangs {
    /// Has the thread hang.
    fn begin(&self) {
        // It may have hung before.
        self.does.store(false, Ordering::SeqCst);
        self.told.store(true, Ordering::SeqCst);
        while !self.does.load(Ordering::Relaxed) {
            std::thread::yield_now();
        }
    }

    fn end(&self) {
        self.told.store(false, Ordering::Relaxed);
    }
}

impl Queue for Hanging {
    fn receive(&mut self, sink: &mut dyn FnMut(&[Frame<'_>])) -> Result<Received, SourceError> {
        while self.hangs.told.load(Ordering::Relaxed) {
            self.hangs.does.store(true, Ordering::Relaxed);
            std::thread::sleep(Duration::from_millis(1));
        }
        if let Some(queue) = &mut self.of {
            return queue.receive(sink);
        }
        let frame = Frame {
            bytes: &[0; 60],
            wire_len: 60,
            ts_ns: 0,
            flags: 0,
            vlan_tci: 0,
            ..Frame::default()
        };
        sink(&[frame]);
        std::thread::sleep(Duration::from_millis(1));
        Ok(Received::Frames(1))
    }

    fn arm(&mut self) -> Wake<'_> {
        Wake::NOW
    }

    fn woke(&mut self, seen: Seen) {
        if let Some(queue) = &mut self.of {
            queue.woke(seen);
        }
    }

    fn epoll(&self) -> Option<Arc<OwnedFd>> {
        self.of.as_ref()?.epoll()
    }

    fn found(&mut self, number: u64, flags: EventFlags) {
        if let Some(queue) = &mut self.of {
            queue.found(number, flags);
        }
    }

    fn counters(&mut self) -> QueueCounters {
        QueueCounters::default()
    }

    fn state(&self) -> &'static str {
        "up"
    }
}

/// Adds a source of one queue whose thread hangs when the flag is set, and watches all threads.
fn with_a_hanging_source(hub: &mut Hub) -> (Arc<Hangs>, Arc<OwnedFd>) {
    with_a_hanging_source_and(hub, Manager::default(), &asleep())
}

/// The pulse of a control thread that has nothing to do.
fn asleep() -> Arc<Pulse> {
    let pulse = Arc::new(Pulse::new("control", "serving"));
    pulse.sleep(0);
    pulse
}

/// The same, told to this service manager, with this pulse of the control thread.
fn with_a_hanging_source_and(
    hub: &mut Hub,
    manager: Manager,
    control: &Arc<Pulse>,
) -> (Arc<Hangs>, Arc<OwnedFd>) {
    let hangs = add_hanging(hub, "slow", (None, None));
    let never = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).unwrap();
    let lines = hub.sources.iter().flat_map(|it| &it.workers);
    let lines: Vec<_> = lines.map(Worker::line).collect();
    let watch = crate::watch::Watch::default();
    watch.add(lines);
    let manager = Arc::new(manager);
    let told = watch
        .start(never, Arc::clone(control), manager, || ())
        .unwrap();
    (hangs, told)
}

/// Adds a source of one queue whose thread hangs when it is told to.
fn add_hanging(
    hub: &mut Hub,
    name: &str,
    (of, board): (Option<Box<dyn Queue>>, Option<Switchboard>),
) -> Arc<Hangs> {
    let hangs = Arc::new(Hangs::default());
    let options = WorkerOptions {
        name: format!("{name}@0"),
        ..WorkerOptions::default()
    };
    let queue = Hanging {
        hangs: Arc::clone(&hangs),
        of,
    };
    let worker = Worker::start(Box::new(queue), options).unwrap();
    let workers = vec![worker];
    hub.add_source(Source {
        name: name.into(),
        kind: "test",
        description: String::new(),
        link_type: 1,
        interface: None,
        board,
        transmits: false,
        early: Early::new(Err(None), &workers),
        lent: None,
        workers,
        program: String::new(),
        is_untimed: false,
        closing: 0,
    });
    hangs
}

fn figure(counted: &Message, kind: &str, name: &str, value: &str) -> u64 {
    let Message::Counters(all) = counted else {
        panic!("{counted:?}");
    };
    let mut all = all.iter().filter(|it| it.kind == kind && it.name == name);
    let values = all.next().map(|it| &it.values).unwrap();
    values.iter().find(|(key, _)| key == value).unwrap().1
}

#[test]
fn a_thread_that_hangs_is_waited_for_by_nobody_and_its_figures_are_the_last_known() {
    let mut hub = hub();
    let (hangs, _told) = with_a_hanging_source(&mut hub);
    let open = |hub: &mut Hub, device: &str| {
        let request = request(device, "");
        open_own(hub, &request, Peer::User(0), Programs::default())
    };
    let slow = open(&mut hub, "slow").unwrap().opened.port;
    let lab = open(&mut hub, "lab").unwrap().opened.port;
    let look = || {
        let step = hub.counters(Vec::new());
        done(&mut hub, step).unwrap()
    };
    let before = until("something comes", look, |counted| {
        figure(counted, "source", "slow", "read") > 0
    });
    hangs.begin();

    // It is asked before anybody knows, and does not answer.
    let begun = Instant::now();
    let tuning = hub.tune(slow, Tuning::default());
    let mut closing = hub.begin_close(slow).unwrap();
    assert!(!closing.is_over(Instant::now()));
    assert!(
        begun.elapsed() < Duration::from_millis(500),
        "{:?}",
        begun.elapsed()
    );

    // Others are served meanwhile, in no time to speak of.
    let (viewer, policy) = (policy::Peer::User(0), policy::Policy::new(0));
    let sight = |_: &str, _| policy::Sight::Through(String::new());
    let mut took: Vec<Duration> = (0..50)
        .map(|_| {
            let begun = Instant::now();
            let devices = hub.devices(&viewer, sight, &policy);
            assert_eq!(devices.len(), 2);
            let step = hub.tune(lab, Tuning::default());
            done(&mut hub, step).unwrap();
            begun.elapsed()
        })
        .collect();
    took.sort_unstable();
    assert!(took[25] < Duration::from_millis(10), "{took:?}");

    // Who asked is told when it is sure.
    let refusal = done(&mut hub, tuning).unwrap_err();
    assert_eq!(refusal.code, code::UNAVAILABLE);
    let says = "source \"slow\"'s queue 0 has not answered for";
    assert!(refusal.text.contains(says), "{}", refusal.text);
    let refusal = open(&mut hub, "slow").err().unwrap();
    assert!(refusal.text.contains(says), "{}", refusal.text);
    let devices = hub.devices(&viewer, sight, &policy);
    let states: Vec<&str> = devices.iter().map(|it| it.state.as_str()).collect();
    // On a busy machine the generator may be behind.
    assert!(
        !states[0].contains("stalled") && states[1] == "stalled",
        "{states:?}"
    );
    let step = hub.counters(Vec::new());
    let counted = done(&mut hub, step).unwrap();
    for value in ["read", "duties"] {
        let of = |counted| figure(counted, "source", "slow", value);
        assert_eq!(of(&counted), of(&before), "{value}");
    }
    let Message::Counters(all) = counted else {
        panic!();
    };
    let slow_source = all.iter().find(|it| it.name == "slow").unwrap();
    let stalled = slow_source.labels.iter().find(|(key, _)| key == "stalled");
    assert!(stalled.unwrap().1.contains(says), "{stalled:?}");

    // What was begun ends when it goes on.
    assert!(closing.is_stalled() && !closing.is_over(Instant::now()));
    hangs.end();
    eventually("it goes on", || {
        let pulse = hub.sources[1].workers[0].pulse();
        closing.is_over(Instant::now()) && pulse.stalled().is_none()
    });
    assert!(hub.finish_close(closing).remains.bytes() > 0);
    open(&mut hub, "slow").unwrap();
}

#[test]
fn who_closes_a_port_of_a_switch_is_answered_when_its_thread_has_closed_it() {
    let dir = TestDir::new("kick");
    let mut config = SwitchConfig::new("lan0");
    config.sockets.stream = Some(dir.path("stream"));
    let (queue, board) = Switch::open(config).unwrap();
    let mut hub = hub();
    let hangs = add_hanging(&mut hub, "lan0", (Some(queue), Some(board.clone())));
    let join = || {
        let client = UnixStream::connect(dir.path("stream")).unwrap();
        client.set_nonblocking(true).unwrap();
        until("it has a port", || board.holders(), |it| it.len() == 1);
        client
    };
    let is_told = |client: &mut UnixStream| matches!(client.read(&mut [0]), Ok(0));
    let port = NonZeroU16::MIN;
    let mut client = join();
    hangs.begin();
    let mut step = hub.close_port("lan0", port).unwrap();
    for _ in 0..10 {
        step = step.carry_on(&mut hub, Instant::now() + Duration::from_millis(10));
        assert!(!step.is_done(), "it is answered, and nobody has closed it");
    }
    assert!(!is_told(&mut client));
    hangs.end();
    done(&mut hub, step).unwrap();
    eventually("it is told", || is_told(&mut client));
    eventually("its port is free", || board.holders().is_empty());
    // A thread that does not answer is said.
    let mut client = join();
    hangs.begin();
    let step = hub.close_port("lan0", port).unwrap();
    let refusal = done(&mut hub, step).unwrap_err();
    assert!(
        refusal.text.contains("done when it goes on"),
        "{}",
        refusal.text
    );
    hangs.end();
    eventually("it is told", || is_told(&mut client));
}

#[test]
fn a_hub_ends_although_a_thread_hangs() {
    let mut hub = hub();
    let (hangs, _told) = with_a_hanging_source(&mut hub);
    hangs.begin();
    let begun = Instant::now();
    drop(hub);
    assert!(
        begun.elapsed() < Duration::from_secs(20),
        "{:?}",
        begun.elapsed()
    );
    hangs.end();
}

#[test]
fn the_watchdog_is_fed_while_all_threads_turn_and_told_which_does_not() {
    let dir = TestDir::new("watchdog");
    let heard = UnixDatagram::bind(dir.path("notify")).unwrap();
    heard.set_nonblocking(true).unwrap();
    // One after another, oldest first; without end what nobody has said yet.
    let next = || {
        let mut bytes = [0; 256];
        let len = heard.recv(&mut bytes).ok()?;
        Some(String::from_utf8_lossy(&bytes[..len]).into_owned())
    };
    let within = Some(Duration::from_millis(500));
    let manager = Manager::new(dir.path("notify").as_os_str(), within).unwrap();
    let (mut hub, control) = (hub(), asleep());
    let (hangs, _told) = with_a_hanging_source_and(&mut hub, manager, &control);
    let fed = |it: &Option<String>| it.as_deref() == Some("WATCHDOG=1");
    until("the watchdog is fed", next, fed);

    hangs.begin();
    let hung = |it: &Option<String>| it.as_deref() == Some("STATUS=slow@0 hangs");
    until("the manager hears who hangs", next, hung);
    std::thread::sleep(Duration::from_secs(1));
    assert_eq!(next(), None, "a daemon that hangs feeds nobody");
    hangs.end();
    let serves = |it: &Option<String>| it.as_deref() == Some("STATUS=Serving");
    until("the manager hears that it goes on", next, serves);
    until("the watchdog is fed again", next, fed);

    // The control thread is in the middle of a turn, and stays there.
    control.beat(1);
    let hung = |it: &Option<String>| it.as_deref() == Some("STATUS=control hangs");
    until(
        "the manager hears that requests are not answered",
        next,
        hung,
    );
    control.sleep(1);
    until("the manager hears that they are", next, serves);
}
