//! Programs that use a back-end while the daemon is killed and started again.

use std::fs::{self, File};
use std::io::Write;
use std::process::{Command, Stdio};
use std::rc::Rc;
use std::time::Duration;

use vnplug::{BackEnd, Heard};
use vnplug_e2e::daemon::Daemon;
use vnplug_e2e::user::{USER, open_to_all};
use vnplug_e2e::{Guest, Lab};
use vnplug_testing::{PATIENCE, until};

use super::memory::shares_again;
use super::{back_end, heard, joined};

/// A program that uses the back-end, wherever it runs.
pub(crate) struct Program<'a> {
    said: Box<dyn Fn() -> String + 'a>,
    says: Box<dyn FnMut(&str) + 'a>,
    ends: Box<dyn FnOnce() + 'a>,
}

impl<'a> Program<'a> {
    /// In a guest.
    pub(crate) fn in_guest(guest: &'a Guest) -> Self {
        let command = "vnplug channel kv --dump 32 <>/tmp/quiet 2>&1";
        let job = Rc::new(guest.spawn(command).unwrap());
        let runs = Rc::clone(&job);
        Self {
            said: Box::new(move || runs.peek(8192).unwrap_or_default()),
            says: Box::new(|text| {
                let says = format!("echo {text} >/tmp/quiet");
                assert_eq!(guest.run(&says, PATIENCE).unwrap().status, 0);
            }),
            ends: Box::new(move || job.signal("KILL").unwrap()),
        }
    }

    /// A process of the ordinary user's on the host.
    fn process(lab: &Lab, daemon: &Daemon) -> Self {
        let path = lab.dir().join("said");
        let said = File::create(&path).unwrap();
        let user = USER.to_string();
        let mut command = Command::new("setpriv");
        command.args([
            "--reuid",
            &user,
            "--regid",
            &user,
            "--clear-groups",
            "--pdeathsig",
            "KILL",
        ]);
        let vnplug = daemon.command().unwrap();
        command.arg(vnplug.get_program()).args(vnplug.get_args());
        command.args(["channel", "kv", "--dump", "32"]);
        command
            .stdin(Stdio::piped())
            .stderr(said.try_clone().unwrap());
        let mut child = command.stdout(said).spawn().unwrap();
        let mut input = child.stdin.take().unwrap();
        Self {
            said: Box::new(move || fs::read_to_string(&path).unwrap()),
            says: Box::new(move |text| writeln!(input, "{text}").unwrap()),
            ends: Box::new(move || {
                child.kill().unwrap();
                child.wait().unwrap();
            }),
        }
    }
}

/// The daemon is killed under a program with memory, and started again: program and back-end go on by themselves.
pub(crate) fn resumes(
    mut program: Program<'_>,
    whose: &str,
    back: &mut BackEnd,
    restart: impl FnOnce(),
) {
    let channel = joined(back, whose);
    let shows = |program: &Program<'_>, text: &str| {
        until("the program shows it", &*program.said, |said| {
            said.contains(text)
        })
    };
    let before = shares_again(back, channel, 1 << 20, true);
    back.memory(before).unwrap().write(0, b"before").unwrap();
    back.event(channel, 0, 1).unwrap();
    shows(&program, &format!("memory {before} begins: before"));
    restart();
    assert!(matches!(heard(back), Heard::Left { channel: of, .. } if of == channel));
    assert!(matches!(heard(back), Heard::Gone(_)));
    assert_eq!(heard(back), Heard::Back);
    let channel = joined(back, whose);
    shows(&program, "# gone");
    shows(&program, "# back");
    // Messages both ways, events, and memory; what was shared before are zeros.
    (program.says)("again");
    assert!(
        matches!(heard(back), Heard::Message { channel: of, bytes } if of == channel && bytes == b"again")
    );
    back.send(channel, b"heard").unwrap();
    shows(&program, "heard");
    let after = shares_again(back, channel, 1 << 20, true);
    back.memory(after).unwrap().write(0, b"after").unwrap();
    back.event(channel, 0, 1).unwrap();
    let said = shows(&program, &format!("memory {after} begins: after"));
    let emptied = format!("memory {before} begins:");
    let shown = said.lines().rfind(|line| line.contains(&emptied));
    assert!(shown.unwrap().trim_end().ends_with("begins:"), "{said}");
    assert!(back.withdraw(after, Duration::from_secs(30)).unwrap());
    (program.ends)();
    assert!(matches!(heard(back), Heard::Left { channel: of, .. } if of == channel));
}

#[test]
fn a_process_beside_the_daemon_goes_on_when_that_was_killed_and_started_again() {
    let lab = Lab::new().unwrap();
    let config = open_to_all(&lab, "");
    let whose = format!("uid:{USER}");
    let kv = format!("kv,id=85,uid=0,open={whose},memory=8M");
    let args = [
        "--config",
        &config,
        "--source",
        "lab=gen,pps=100",
        "--backend",
        &kv,
    ];
    let mut daemon = Daemon::start(&lab, None, &args).unwrap();
    let mut back = back_end(&daemon);
    let program = Program::process(&lab, &daemon);
    resumes(program, &whose, &mut back, || {
        daemon.kill();
        daemon.launch().unwrap();
    });
}
