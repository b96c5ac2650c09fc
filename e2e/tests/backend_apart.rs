//! Memory that a back-end shares with a process: nobody opens it again, and who only reads it cannot write it.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs::{self, File};
use std::os::fd::{AsFd, OwnedFd};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use rustix::fs::{MemfdFlags, memfd_create};
use vnplug::{BackEnd, BackEndOptions, Heard, map_memory};
use vnplug_e2e::Lab;
use vnplug_e2e::daemon::Daemon;
use vnplug_e2e::raw::Raw;
use vnplug_e2e::user::{USER, as_uid, open_to_all};
use vnplug_ring::control::{Backend, Message};
use vnplug_testing::until;

const SHARED: &[u8; 6] = b"shared";

fn heard(back: &mut BackEnd) -> Heard {
    let heard = back.next(Some(Duration::from_secs(20))).unwrap();
    heard.expect("the back-end hears something")
}

/// A shell of this user's that has the memory at its input.
fn shell(uid: u32, script: &str, memory: &OwnedFd) -> Command {
    let uid = uid.to_string();
    let mut shell = Command::new("setpriv");
    shell
        .args(["--reuid", &uid, "--regid", &uid, "--clear-groups"])
        .args(["--pdeathsig", "KILL", "sh", "-c", script])
        .stdin(Stdio::from(memory.try_clone().unwrap()))
        .stderr(Stdio::null());
    shell
}

/// A process of the user's that goes on with the memory.
struct Holder(Child);

impl Holder {
    fn start(memory: &OwnedFd) -> Self {
        let holder = Self(shell(USER, "exec sleep 600", memory).spawn().unwrap());
        // It is that user's by then.
        let name = format!("/proc/{}/comm", holder.0.id());
        until(
            "it sleeps",
            || fs::read_to_string(&name).unwrap(),
            |name| *name == "sleep\n",
        );
        holder
    }

    /// Its memory, as others see it.
    fn path(&self) -> String {
        format!("/proc/{}/fd/0", self.0.id())
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Whether a shell of this user's can do this, with the memory at its input.
fn can(uid: u32, script: &str, memory: &OwnedFd) -> bool {
    shell(uid, script, memory).status().unwrap().success()
}

/// Whether a shell of this user's opens what is at the path: to read, and to write, which it does.
fn opens(uid: u32, path: &str, memory: &OwnedFd) -> [bool; 2] {
    let scripts = [format!("exec 3<{path}"), format!("printf theirs 1<>{path}")];
    scripts.map(|script| can(uid, &script, memory))
}

/// The program's own process.
const OWN: &str = "/proc/self/fd/0";

#[test]
fn nobody_opens_memory_again_and_who_only_reads_it_does_not_write_it() {
    let lab = Lab::new().unwrap();
    let config = open_to_all(&lab, "");
    let kv = "kv,id=85,uid=0,open=uid:*,memory=8M";
    let daemon = Daemon::start(&lab, None, &["--config", &config, "--backend", kv]).unwrap();
    let options = BackEndOptions::new(85, "kv").socket(daemon.socket());
    let mut back = options.register().unwrap();
    let socket = daemon.socket();
    let (mut raw, channel) = as_uid(USER, move || Raw::program(&socket, 85));
    assert!(matches!(heard(&mut back), Heard::Joined { channel: of, .. } if of == channel));
    // The control: memory that anybody made is opened again by these ways, but not out of another user's process.
    let nothing = OwnedFd::from(File::open("/dev/null").unwrap());
    let ordinary = memfd_create("ordinary", MemfdFlags::CLOEXEC).unwrap();
    let holder = Holder::start(&ordinary);
    assert_eq!(opens(USER, OWN, &ordinary), [true; 2]);
    assert_eq!(opens(USER, &holder.path(), &nothing), [true; 2]);
    assert_eq!(opens(USER + 1, &holder.path(), &nothing), [false; 2]);
    for writable in [false, true] {
        let region = back.share(channel, 4096, writable).unwrap();
        while !matches!(
            raw.next().unwrap(),
            (_, Message::Backend(Backend::Mapped(_)))
        ) {}
        let memory = raw.take_fds().pop().unwrap();
        let ours = back.memory(region).unwrap();
        ours.write(0, SHARED).unwrap();
        let is = |due: &[u8; 6]| {
            let mut begins = [0; 6];
            ours.read(0, &mut begins).unwrap();
            assert_eq!(&begins, due, "writable: {writable}");
        };
        // By opening it again: the program, another process of its user, and one of another user.
        let holder = Holder::start(&memory);
        for (uid, path) in [
            (USER, OWN),
            (USER, &holder.path()),
            (USER + 1, OWN),
            (USER + 1, &holder.path()),
        ] {
            let has = if path == OWN { &memory } else { &nothing };
            let opened = opens(uid, path, has);
            assert_eq!(opened, [false; 2], "{uid}, {path}, writable: {writable}");
        }
        is(SHARED);
        // By the descriptor that it was given: if it may.
        assert_eq!(map_memory(memory.as_fd(), 4096).is_ok(), writable);
        assert_eq!(can(USER, "printf theirs >&0", &memory), writable);
        is(if writable { b"theirs" } else { SHARED });
        // It is there: root, whom its mode does not bind, opens it.
        ours.write(0, SHARED).unwrap();
        assert_eq!(opens(0, &holder.path(), &nothing), [true; 2]);
        is(b"theirs");
    }
}
