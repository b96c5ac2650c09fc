//! The daemon itself with an AF_XDP source: its power dropped, killed, started again.

use std::io::Read;
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use vnplug_testing::{Deadline, until};

use crate::net::{ip, isolated};
use crate::{attached, sockets, veth};

struct Daemon {
    child: Child,
    dir: PathBuf,
    said: String,
}

impl Daemon {
    fn start(name: &str, source: &str) -> Self {
        let name = format!("vnplug-xdp-{name}-{}", std::process::id());
        let dir = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&dir).expect("a directory");
        let child = Command::new(env!("CARGO_BIN_EXE_vnplugd"))
            .args(["--source", source])
            .arg("--socket")
            .arg(dir.join("socket"))
            .arg("--state-dir")
            .arg(dir.join("state"))
            .arg("--pool-dir")
            .arg(&dir)
            .stderr(Stdio::piped())
            .spawn()
            .expect("start the daemon");
        let said = String::new();
        Self { child, dir, said }
    }

    /// Reads its log until it says this.
    fn says(&mut self, words: &str) {
        let deadline = Deadline::new(format!("it says {words:?}"));
        let log = self.child.stderr.as_mut().expect("a pipe");
        while !self.said.contains(words) {
            deadline.check_seen(&self.said);
            let timeout = Timespec {
                tv_sec: 1,
                tv_nsec: 0,
            };
            let mut fds = [PollFd::from_borrowed_fd(log.as_fd(), PollFlags::IN)];
            if poll(&mut fds, Some(&timeout)).expect("poll") > 0 {
                let mut bytes = [0; 4096];
                let len = log.read(&mut bytes).expect("read");
                assert!(len > 0, "it ended: {}", self.said);
                self.said.push_str(&String::from_utf8_lossy(&bytes[..len]));
            }
        }
    }

    fn kill(&mut self) {
        self.child.kill().expect("kill");
        self.child.wait().expect("wait");
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}

#[test]
fn a_killed_daemon_leaves_nothing_at_the_interface_and_the_next_one_starts_at_once() {
    isolated(|| {
        veth(2);
        for _ in 0..3 {
            // With the fallback it would start in any case.
            let mut daemon = Daemon::start("killed", "va=af_xdp,fallback=no");
            daemon.says("serving");
            assert!(
                daemon
                    .said
                    .contains("XDP native, copied by the kernel, 2 queues"),
                "{}",
                daemon.said
            );
            assert!(attached("va").is_some());
            daemon.kill();
            let look = || attached("va");
            until("its program has gone", look, Option::is_none);
        }
    });
}

#[test]
fn without_its_power_the_daemon_finds_an_interface_again() {
    isolated(|| {
        veth(2);
        let mut daemon = Daemon::start("again", "va=af_xdp,fallback=no");
        daemon.says("serving");
        ip("link del va");
        daemon.says("is gone");
        veth(2);
        daemon.says("is back");
        assert!(attached("va").is_some());
    });
}

#[test]
fn busy_polling_is_set_where_it_was_asked_for_and_its_end_is_said() {
    isolated(|| {
        veth(2);
        let set = |daemon: &Daemon| -> Vec<_> {
            let sockets = sockets::of(daemon.child.id());
            sockets.iter().map(sockets::busy_poll).collect()
        };
        let mut daemon = Daemon::start("busy", "va=af_xdp,fallback=no,busy_poll=50");
        daemon.says("serving");
        assert_eq!(set(&daemon), [(1, 50); 2]);
        assert!(!daemon.said.contains("no busy polling"), "{}", daemon.said);
        // Binding again, it has no CAP_NET_ADMIN any more: it receives, says what it does without,
        // and why.
        ip("link del va");
        daemon.says("is gone");
        veth(2);
        daemon.says("is back");
        daemon.says("no busy polling: Operation not permitted");
        daemon.says("it needs CAP_NET_ADMIN");
        assert!(set(&daemon).iter().all(|(prefers, _)| *prefers == 0));
        daemon.kill();
        // The control.
        let mut daemon = Daemon::start("calm", "va=af_xdp,fallback=no");
        daemon.says("serving");
        assert!(set(&daemon).iter().all(|(prefers, _)| *prefers == 0));
        drop(daemon);
        let mut daemon = Daemon::start("much", "va=af_xdp,fallback=no,busy_poll=10001");
        daemon.says("busy_poll is 10001 microseconds; it must be at most 10000");
    });
}

#[test]
fn a_filter_of_what_is_taken_is_compiled_at_start() {
    isolated(|| {
        veth(1);
        let mut daemon = Daemon::start("take", "va=af_xdp,fallback=no,take=udp port 53");
        daemon.says("serving");
        assert!(
            daemon.said.contains("takes what take= matches"),
            "{}",
            daemon.said
        );
        drop(daemon);
        // A bridge has no XDP of its own.
        ip("link add br0 type bridge");
        ip("link set br0 up");
        let mut daemon = Daemon::start("instead", "br0=af_xdp,mode=native,take=udp port 53");
        daemon.says("serving");
        assert!(
            daemon.said.contains("by a packet socket instead of XDP"),
            "{}",
            daemon.said
        );
        let mut daemon = Daemon::start("wrong", "va=af_xdp,take=udp prt 53");
        daemon.says("take is a filter");
    });
}
