//! A back-end that dies, and a program that does: how soon the other side is told.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::time::{Duration, Instant, SystemTime};

use vnplug::{BackEnd, Heard};
use vnplug_e2e::Guest;
use vnplug_e2e::daemon::Daemon;
use vnplug_e2e::times::Times;
use vnplug_testing::{Deadline, PATIENCE};

use super::{EMULATED, back_end, heard, joined};

/// How often each side dies.
const DEATHS: usize = 11;

/// What a guest's shell does by itself for us to see at once: to ask a guest takes a second where it is emulated.
struct Sign {
    /// The command, in which `$n` is a number.
    command: &'static str,
    /// Where it shows here, and whether by a file for each number or by lines.
    path: PathBuf,
    by_files: bool,
    /// How long it may take to be given, in the median.
    limit: Duration,
}

impl Sign {
    fn of(guest: &Guest) -> Self {
        let sign = |command, path, by_files| Self {
            command,
            path,
            by_files,
            limit: Duration::from_millis(100),
        };
        if let Some(dir) = guest.shared_dir() {
            return sign("echo >/host/told$n", dir.join("told"), true);
        }
        if guest.qmp_path().is_some() {
            let console = guest.dir().join("console.log");
            // Twice: the kernel may print in the middle of one.
            let twice = "echo told$n. >/dev/console; echo told$n. >/dev/console";
            return Self {
                limit: EMULATED,
                ..sign(twice, console, false)
            };
        }
        // A container's root lies here, and its root is an ordinary user.
        let file = guest.dir().join("root/told");
        fs::write(&file, "").unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(0o666)).unwrap();
        sign("echo told$n. >>/told", file, false)
    }

    fn is_given(&self, number: usize) -> bool {
        match self.by_files {
            true => fs::exists(format!("{}{number}", self.path.display())).unwrap(),
            false => {
                let said = fs::read(&self.path).unwrap();
                let sign = format!("told{number}.");
                said.windows(sign.len()).any(|it| it == sign.as_bytes())
            }
        }
    }
}

/// The back-end goes without a word, and comes again, as often: a program is told, and comes again by itself.
pub(crate) fn back_end_dies(
    guest: &Guest,
    daemon: &Daemon,
    mut back: BackEnd,
    whose: &str,
) -> BackEnd {
    let sign = Sign::of(guest);
    let command = sign.command;
    let program = guest.spawn(&format!(
        "n=0; vnplug channel kv <>/tmp/quiet 2>&1 | \
         while read -r line; do case $line in '# gone'*) {command}; n=$((n + 1));; esac; done"
    ));
    let program = program.unwrap();
    let mut channel = joined(&mut back, whose);
    let mut times = Times::default();
    for number in 0..DEATHS {
        assert!(!sign.is_given(number), "it has not died yet");
        let began = Instant::now();
        drop(back);
        let deadline = Deadline::new("the program is told");
        while !sign.is_given(number) {
            deadline.check();
            std::thread::sleep(Duration::from_millis(1));
        }
        times.push(began.elapsed());
        back = back_end(daemon);
        channel = joined(&mut back, whose);
    }
    let what = format!("{whose}: to tell a program of the back-end's death");
    times.are_within(sign.limit, &what);
    program.signal("KILL").unwrap();
    assert!(matches!(heard(&mut back), Heard::Left { channel: of, .. } if of == channel));
    back
}

/// A program in a User-mode Linux is killed, as often: the back-end is told.
pub(crate) fn program_dies(guest: &Guest, mut back: BackEnd) -> BackEnd {
    let dies = guest.shared_dir().unwrap().join("dies");
    let mut times = Times::default();
    for _ in 0..DEATHS {
        let program = guest.spawn("vnplug channel kv <>/tmp/quiet 2>&1").unwrap();
        let channel = joined(&mut back, "vm:uml");
        let kill = "program=$(pidof vnplug | tr ' ' '\n' | sort -n | tail -1); \
                    echo >/host/dies; kill -9 $program";
        let kills = guest.spawn(kill).unwrap();
        assert!(matches!(heard(&mut back), Heard::Left { channel: of, .. } if of == channel));
        let now = SystemTime::now();
        assert_eq!(kills.wait(PATIENCE).unwrap().status, 0);
        let died = fs::metadata(&dies).unwrap().modified().unwrap();
        times.push(now.duration_since(died).unwrap());
        fs::remove_file(&dies).unwrap();
        program.wait(PATIENCE).unwrap();
    }
    let what = "to tell of the death of a program in the guest";
    times.are_within(Duration::from_millis(100), what);
    back
}
