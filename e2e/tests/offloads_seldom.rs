//! What TCP says seldom reaches a guest whose segments are merged, and whose ACKs are expanded, as it was said: urgent data,
//! a window of nothing, keep-alives, and the end of a connection by RST. A capture shows that it was said.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::path::PathBuf;
use std::thread::sleep;
use std::time::Duration;

use rustix::net::sockopt::{
    set_socket_keepalive, set_socket_linger, set_socket_recv_buffer_size, set_tcp_keepidle,
    set_tcp_keepintvl,
};
use rustix::net::{SendFlags, send};
use vnplug_e2e::daemon::{Daemon, value};
use vnplug_e2e::ends::{keep_window, ran};
use vnplug_e2e::station::{Station, content};
use vnplug_e2e::sums::Capture;
use vnplug_e2e::{Guest, Image, Job, Lab, Uml, UmlConfig};
use vnplug_testing::{PATIENCE, eventually};

/// Bytes of what is moved.
const LEN: usize = 8 << 20;
/// How long an end is silent, or does not read.
const PAUSE: Duration = Duration::from_millis(1_500);

/// A guest, and a station whose frames are those of the wire.
struct Site {
    guest: Guest,
    far: Station,
    daemon: Daemon,
    lab: Lab,
    bytes: Vec<u8>,
}

impl Site {
    fn new() -> Self {
        let lab = Lab::new().unwrap();
        let (socket, dir) = (lab.dir().join("lan0.sock"), lab.dir().join("lan0.ctl"));
        let spec = format!("lan0,vhost={},vde={}", socket.display(), dir.display());
        let daemon = Daemon::start(&lab, None, &["--switch", &spec]).unwrap();
        let config = UmlConfig::vhost_user(&socket, Image::default().program("/usr/sbin/ethtool"));
        let guest = Uml::boot(&lab, config).unwrap();
        let far = Station::by_vde(&lab, &dir, FAR).unwrap();
        let site = Self {
            guest,
            far,
            daemon,
            lab,
            bytes: content(LEN),
        };
        let joins = format!("ip addr add {GUEST}/32 dev eth0 && ip link set eth0 up");
        // Its kernel merges nothing.
        for command in [&*joins, "ethtool -K eth0 gro off"] {
            ran(&site.guest, command);
        }
        keep_window(&site.guest, GUEST);
        assert!(site.far.pings(GUEST));
        let sent = lab_file(&site.lab, "sent");
        std::fs::write(&sent, &site.bytes).unwrap();
        site.guest.push(&sent, "/tmp/sent", PATIENCE).unwrap();
        site
    }

    fn count(&self, name: &str) -> u64 {
        let counters = self.daemon.counters();
        value(counters.iter().find(|it| it.name == "lan0").unwrap(), name)
    }

    /// A connection to the guest, which reads by this command.
    fn to_guest(&self, reads: &str) -> (Job, TcpStream) {
        let command = format!("nc -l -p 7000 </dev/null | {{ {reads}; }} >/tmp/came");
        let job = self.guest.spawn(&command).unwrap();
        let connect = || self.far.netns.enter(|| TcpStream::connect((GUEST, 7000)));
        let mut stream = None;
        eventually("the guest listens", || {
            stream = connect().unwrap().ok();
            stream.is_some()
        });
        let stream = stream.unwrap();
        stream.set_write_timeout(Some(PATIENCE)).unwrap();
        (job, stream)
    }

    /// What came when the guest's program has ended.
    fn came(&self, job: &Job) -> Vec<u8> {
        let done = job.wait(PATIENCE).unwrap();
        assert!(done.success(), "{}", done.text());
        let came = lab_file(&self.lab, "came");
        self.guest.pull("/tmp/came", &came, PATIENCE).unwrap();
        std::fs::read(came).unwrap()
    }

    /// All of it reaches a guest that reads so, but for what `sends` does in the middle.
    fn whole(&self, about: &str, reads: &str, sends: impl FnOnce(&TcpStream)) {
        let (job, mut stream) = self.to_guest(reads);
        let (one, other) = self.bytes.split_at(LEN / 2);
        stream.write_all(one).unwrap();
        sends(&stream);
        stream.write_all(other).unwrap();
        stream.shutdown(Shutdown::Write).unwrap();
        assert!(self.came(&job) == self.bytes, "{about}");
    }

    /// Urgent data is no part of what a program reads in order.
    fn urgent(&self, about: &str) {
        self.whole(about, "cat", |stream| {
            assert_eq!(send(stream, b"!", SendFlags::OOB).unwrap(), 1);
        });
    }

    fn keep_alives(&self, about: &str) {
        self.whole(about, "cat", |stream| {
            set_tcp_keepidle(stream, Duration::from_secs(1)).unwrap();
            set_tcp_keepintvl(stream, Duration::from_secs(1)).unwrap();
            set_socket_keepalive(stream, true).unwrap();
            // What is written has to be acknowledged first. The guest's nc has nothing to say, and has closed its half.
            let own = format!(":{}", stream.local_addr().unwrap().port());
            eventually("all is acknowledged", || {
                let said = self.far.netns.exec(&["ss", "-Htn", "sport", "=", &own]);
                said.unwrap().split_whitespace().nth(2) == Some("0")
            });
            // Two of them: the answer to the first may have a new window, and tshark calls it a window update.
            sleep(2 * PAUSE);
        });
    }

    /// The guest has no room for a while.
    fn no_window_there(&self, about: &str) {
        let reads = format!("sleep {}; cat", PAUSE.as_secs_f32());
        self.whole(about, &reads, |_| {});
    }

    /// The far end has no room for a while, for what the guest sends.
    fn no_window_here(&self, about: &str) {
        let bind = || TcpListener::bind((FAR, 7000));
        let listener = self.far.netns.enter(bind).unwrap().unwrap();
        set_socket_recv_buffer_size(&listener, 64 << 10).unwrap();
        let command = format!("nc {FAR} 7000 </tmp/sent");
        let job = self.guest.spawn(&command).unwrap();
        listener.set_nonblocking(true).unwrap();
        let mut accepted = None;
        eventually("the guest connects", || {
            accepted = listener.accept().ok();
            accepted.is_some()
        });
        let (mut stream, _) = accepted.unwrap();
        stream.set_nonblocking(false).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        sleep(PAUSE);
        let mut came = vec![0; LEN];
        stream.read_exact(&mut came).unwrap();
        drop(stream);
        job.wait(PATIENCE).unwrap();
        assert!(came == self.bytes, "{about}");
    }

    /// The connection ends at once: what came is the beginning of what was sent.
    fn reset(&self, about: &str) {
        let (job, mut stream) = self.to_guest("cat");
        stream.write_all(&self.bytes).unwrap();
        set_socket_linger(&stream, Some(Duration::ZERO)).unwrap();
        drop(stream);
        let came = self.came(&job);
        let is_begin = !came.is_empty() && self.bytes.starts_with(&came);
        assert!(is_begin, "{about}: {}", came.len());
    }
}

#[test]
fn what_tcp_seldom_says_is_heard_where_segments_are_merged_and_acks_expanded() {
    type Says = fn(&Site, &str);
    let all: [(&str, Says, &str); 5] = [
        ("urgent data", Site::urgent, "tcp.flags.urg == 1"),
        (
            "keep-alives",
            Site::keep_alives,
            "tcp.analysis.keep_alive_ack",
        ),
        (
            "the guest has no window",
            Site::no_window_there,
            "tcp.analysis.zero_window && ip.src == 10.77.8.2",
        ),
        (
            FROM_GUEST,
            Site::no_window_here,
            "tcp.analysis.zero_window && ip.src == 10.77.8.3",
        ),
        (
            "reset",
            Site::reset,
            "tcp.flags.reset == 1 && ip.src == 10.77.8.3",
        ),
    ];
    let site = Site::new();
    let set = ["switch", "set", "lan0/port1", "gro=20 acks=expand"];
    assert_eq!(site.daemon.vnplug(&set).0, Some(0));
    for (about, says, filter) in all {
        let mut capture = Capture::start(&site.lab, &site.daemon, "lan0", "seldom").unwrap();
        let before = ["out_super_frames", "acks_expanded"].map(|name| site.count(name));
        says(&site, about);
        let [merged, expanded] = ["out_super_frames", "acks_expanded"].map(|it| site.count(it));
        println!(
            "{about}: {} super-frames, {} ACKs added",
            merged - before[0],
            expanded - before[1]
        );
        // What the guest sends is not merged, and what it receives then is little.
        let is_received = about != FROM_GUEST;
        assert!(!is_received || merged > before[0], "{about}");
        assert!(!is_received || expanded > before[1], "{about}");
        // The control: it was said.
        assert!(capture.passing(filter) > 0, "{about}");
        let (frames, _) = capture.check(about).unwrap();
        assert!(frames > 100, "{about}: {frames}");
    }
    site.daemon.audit();
}

fn lab_file(lab: &Lab, name: &str) -> PathBuf {
    lab.dir().join(name)
}

/// The one case in which the guest is who sends.
const FROM_GUEST: &str = "the far end has no window";
const GUEST: &str = "10.77.8.2";
const FAR: &str = "10.77.8.3";
