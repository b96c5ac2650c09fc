//! How many calls of the system the thread of a switch makes for a frame that comes alone.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::BTreeMap;
use std::fs;
use std::io::{Read, Write};
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread::sleep;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use vnplug::{Next, Port};
use vnplug_e2e::Lab;
use vnplug_e2e::daemon::{Daemon, counted, value};
use vnplug_testing::{PATIENCE, eventually};

/// What libvdeplug does, in a few lines.
struct Plug {
    _ctl: UnixStream,
    data: UnixDatagram,
}

impl Plug {
    fn join(dir: &Path, name: &str) -> Self {
        let path = dir.join(name);
        let data = UnixDatagram::bind(&path).unwrap();
        data.set_read_timeout(Some(PATIENCE)).unwrap();
        let mut request = [0xfeed_face_u32, 3, 0].map(u32::to_ne_bytes).concat();
        request.extend(1_u16.to_ne_bytes());
        request.extend(path.as_os_str().as_encoded_bytes());
        request.resize(12 + 110, 0);
        let mut ctl = UnixStream::connect(dir.join("ctl")).unwrap();
        ctl.write_all(&request).unwrap();
        let mut answer = [0; 110];
        ctl.read_exact(&mut answer).unwrap();
        let name = answer[2..].split(|byte| *byte == 0).next().unwrap();
        data.connect(std::str::from_utf8(name).unwrap()).unwrap();
        Self { _ctl: ctl, data }
    }

    fn send(&self, frame: &[u8]) {
        assert_eq!(self.data.send(frame).unwrap(), frame.len());
    }

    /// That this frame is the next one here.
    fn has(&self, frame: &[u8]) {
        let mut bytes = [0; 2048];
        let len = self.data.recv(&mut bytes).unwrap();
        assert_eq!(&bytes[..len], frame);
    }
}

/// A numbered frame between two stations.
fn frame(to: u8, from: u8, number: u32) -> Vec<u8> {
    let mut frame = vec![2, 0, 0, 0, 0, to, 2, 0, 0, 0, 0, from, 0x88, 0xb5];
    frame.extend(number.to_be_bytes());
    frame.resize(60, 0);
    frame
}

/// The calls of a process' thread of this name while something is done, by what they are.
fn calls_of(lab: &Lab, pid: u32, thread: &str, does: impl FnOnce()) -> BTreeMap<String, usize> {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    let mut tasks = tasks.map(|task| task.unwrap().path());
    let named =
        |task: &Path| fs::read_to_string(task.join("comm")).unwrap() == format!("{thread}\n");
    let task = tasks.find(|task| named(task)).unwrap();
    let log = lab.dir().join("strace.log");
    let mut strace = Command::new("strace")
        .args([
            "-q",
            "-p",
            task.file_name().unwrap().to_str().unwrap(),
            "-o",
        ])
        .arg(&log)
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    eventually("it is traced", || {
        let status = fs::read_to_string(task.join("status")).unwrap();
        status
            .lines()
            .any(|line| line.starts_with("TracerPid:") && !line.ends_with("\t0"))
    });
    does();
    kill_process(Pid::from_child(&strace), Signal::INT).unwrap();
    strace.wait().unwrap();
    let mut calls = BTreeMap::new();
    let (mut is_over, mut paused) = (false, 0);
    for line in fs::read_to_string(log).unwrap().lines() {
        // A pause of ten milliseconds, as a busy machine makes them: the sleep ends, and kicks that lay unread are read.
        let was_over = is_over && line.starts_with("recvfrom(");
        is_over = line.starts_with("epoll_pwait")
            && line.ends_with(" = 0")
            && ![", 0, NULL", "{tv_sec=0, tv_nsec=0}"]
                .iter()
                .any(|now| line.contains(now));
        if is_over || was_over {
            paused += usize::from(is_over);
            continue;
        }
        // The sleep that it is in at the end is no call of a frame's; and some virtual machines' clock is not always read
        // without a call.
        if let Some((name, _)) = line.split_once('(')
            && name != "clock_gettime"
            && !line.contains("<detached ...>")
        {
            *calls.entry(name.to_owned()).or_default() += 1;
        }
    }
    assert!(paused < FRAMES as usize / 4, "{paused} pauses");
    calls
}

/// Frames that come alone, of each way.
const FRAMES: u32 = 200;
/// How often that is counted, if it is too many.
const TRIES: usize = 3;
/// Between two of them: the switch sleeps by then.
const PAUSE: Duration = Duration::from_millis(1);

#[test]
fn a_frame_that_comes_alone_costs_three_calls_by_sockets_and_less_by_rings() {
    let lab = Lab::new().unwrap();
    let dir = lab.dir().join("lan0");
    let switch = format!("lan0,vde={}", dir.display());
    let daemon = Daemon::start(&lab, None, &["--switch", &switch]).unwrap();
    let [one, two] = ["one", "two"].map(|name| Plug::join(&dir, name));
    let mut ring: Port = daemon.port("host:lan0").join().open().unwrap();
    // Each has spoken: no frame is for all any more.
    one.send(&frame(1, 1, 0));
    two.send(&frame(2, 2, 0));
    assert!(ring.send(&frame(3, 3, 0)).unwrap());
    eventually("all are known", || {
        value(counted(&daemon.counters(), "source"), "stations") == 3
    });
    let drains = |plug: &Plug| {
        plug.data.set_nonblocking(true).unwrap();
        while plug.data.recv(&mut [0; 64]).is_ok() {}
        plug.data.set_nonblocking(false).unwrap();
    };
    drains(&one);
    drains(&two);
    while let Next::Packet(_) = ring.next().unwrap() {}

    let check = |what: &str, most: f64, does: &mut dyn FnMut(u32)| {
        // Others who have the processor in the middle of it make it more, and nothing makes it less.
        let told: Vec<_> = (0..TRIES)
            .map(|_| {
                let calls = calls_of(&lab, daemon.pid(), "lan0@0", || {
                    for number in 1..=FRAMES {
                        sleep(PAUSE);
                        does(number);
                    }
                });
                let all = calls.values().sum::<usize>() as f64 / f64::from(FRAMES);
                println!("{what}: {all:.2} calls for a frame: {calls:?}");
                all
            })
            .take_while(|all| *all > most)
            .collect();
        assert!(told.len() < TRIES, "{what}: {told:?} calls for a frame");
    };
    // It sleeps and learns who ended that, receives, and sends.
    check("from a socket to a socket", 3.05, &mut |number| {
        let frame = frame(2, 1, number);
        one.send(&frame);
        two.has(&frame);
    });
    // What is in a ring is not received by a call, and of the kicks some are read together.
    check("from a ring to a socket", 2.25, &mut |number| {
        let frame = frame(2, 3, number);
        assert!(ring.send(&frame).unwrap());
        two.has(&frame);
    });
    // Its reader, which is about to sleep, is woken.
    check("from a socket to a ring", 3.05, &mut |number| {
        one.send(&frame(3, 1, number));
        eventually("it is there", || {
            matches!(ring.next().unwrap(), Next::Packet(_))
        });
    });
    daemon.audit();
}
