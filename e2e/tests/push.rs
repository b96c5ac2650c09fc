//! QEMU's own guest agent puts ours into a guest.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::thread;
use std::time::Duration;

use vnplug_e2e::attached::{image, plug, small_program};
use vnplug_e2e::daemon::Daemon;
use vnplug_e2e::station::Running;
use vnplug_e2e::{Lab, Qemu, QemuConfig};
use vnplug_testing::{eventually, until};

/// Says what it was asked.
const SYSTEMCTL: &str = "#!/bin/sh\necho \"$@\" >>/run/systemctl\n";
const LIMIT: Duration = Duration::from_secs(30);

/// Writes to the agent and is gone, as one who is killed; then asks what it says until it answers, and one thing more.
fn left_behind(agent: &Path, half: &[u8]) -> Vec<String> {
    let mut killed = UnixStream::connect(agent).unwrap();
    killed.write_all(half).unwrap();
    drop(killed);
    let mut next = UnixStream::connect(agent).unwrap();
    next.set_read_timeout(Some(4 * LIMIT)).unwrap();
    let sync = br#"{"execute": "guest-sync-delimited", "arguments": {"id": 4711}}"#;
    next.write_all(&[b"\xff", &sync[..], b"\n"].concat())
        .unwrap();
    let mut lines = BufReader::new(next.try_clone().unwrap());
    let mut line = || {
        let mut line = Vec::new();
        lines.read_until(b'\n', &mut line).unwrap();
        String::from_utf8_lossy(&line).trim_end().to_owned()
    };
    let mut said = vec![line()];
    while said.last().unwrap() != "\u{fffd}{\"return\": 4711}" {
        said.push(line());
    }
    next.write_all(b"{\"execute\": \"guest-ping\"}\n").unwrap();
    assert_eq!(line(), "{\"return\": {}}");
    said.pop();
    said
}

/// Between a push and the agent: lets half of a piece of a file pass, has the agent start again, and lets the rest pass.
struct Cut<'a> {
    /// Where it listens.
    path: PathBuf,
    agent: &'a Path,
    restart: &'a (dyn Fn() + Sync),
    cuts: Mutex<u32>,
    /// What the agent complained of.
    complaints: Mutex<Vec<String>>,
}

impl Cut<'_> {
    /// Serves one after the other, until one says nothing.
    fn serve(&self) {
        let listener = UnixListener::bind(&self.path).unwrap();
        loop {
            let (client, _) = listener.accept().unwrap();
            let mut client = BufReader::new(client);
            if client.fill_buf().unwrap().is_empty() {
                return;
            }
            let mut agent = UnixStream::connect(self.agent).unwrap();
            let answers = agent.try_clone().unwrap();
            let to = client.get_ref().try_clone().unwrap();
            thread::scope(|scope| {
                scope.spawn(move || self.pass_answers(answers, to));
                let mut line = Vec::new();
                while client.read_until(b'\n', &mut line).unwrap_or(0) > 0 {
                    self.pass(&mut agent, &line);
                    line.clear();
                }
                agent.shutdown(Shutdown::Both).unwrap();
            });
        }
    }

    fn pass(&self, agent: &mut UnixStream, line: &[u8]) {
        let mut cuts = self.cuts.lock().unwrap();
        let is_piece = line.windows(16).any(|it| it == b"guest-file-write");
        // Once more, if it had read nothing of it yet.
        let cuts_it = is_piece && *cuts < CUTS && self.complaints.lock().unwrap().is_empty();
        let (front, rest) = match cuts_it {
            true => line.split_at(line.len() / 2),
            false => line.split_at(0),
        };
        if !front.is_empty() {
            agent.write_all(front).unwrap();
            // What it has not read of this when it ends the guest's kernel forgets.
            thread::sleep(READS);
            (self.restart)();
            *cuts += 1;
        }
        agent.write_all(rest).unwrap();
    }

    fn pass_answers(&self, answers: UnixStream, mut to: UnixStream) {
        let mut answers = BufReader::new(answers);
        let mut line = Vec::new();
        while answers.read_until(b'\n', &mut line).unwrap_or(0) > 0 {
            let text = String::from_utf8_lossy(&line);
            if text.contains("error") && *self.cuts.lock().unwrap() > 0 {
                self.complaints.lock().unwrap().push(text.into_owned());
            }
            // Who asked may be gone.
            let _ = to.write_all(&line);
            line.clear();
        }
    }
}

/// The last client, who says nothing: also of a test that fails.
struct Last<'a>(&'a Path);

impl Drop for Last<'_> {
    fn drop(&mut self) {
        drop(UnixStream::connect(self.0));
    }
}

/// How long the agent is given to read half a command. Who sent it waits five seconds for the answer.
const READS: Duration = Duration::from_secs(1);
/// How often that is tried.
const CUTS: u32 = 3;

#[test]
fn qemus_guest_agent_installs_ours_and_starts_it() {
    let lab = Lab::new().unwrap();
    let daemon = Daemon::start(&lab, None, &["--source", "lab=gen,pps=100"]).unwrap();
    let [systemctl, socket] = ["systemctl", "qga"].map(|name| lab.dir().join(name));
    fs::write(&systemctl, SYSTEMCTL).unwrap();
    let program = small_program(&lab).unwrap();
    let config = QemuConfig {
        image: image().unwrap().program("/usr/sbin/qemu-ga").file(
            &systemctl,
            "/usr/bin/systemctl",
            0o755,
        ),
        qemu_args: vec![
            "-chardev".into(),
            format!("socket,id=qga,path={},server=on,wait=off", socket.display()),
            "-device".into(),
            "virtserialport,chardev=qga,name=org.qemu.guest_agent.0".into(),
        ],
        ..QemuConfig::default()
    };
    let guest = Qemu::boot(&lab, config).unwrap_or_else(|error| panic!("{error}"));
    let in_guest = |command: &str| {
        let done = guest.run(command, LIMIT).unwrap();
        assert_eq!(done.status, 0, "{command}: {}", done.text());
        done.text()
    };
    let begin = |more: &str| {
        let path = "$(vport org.qemu.guest_agent.0)";
        let command = format!("echo $$ >/run/qga; exec qemu-ga -t /run -p {path} {more}");
        guest.spawn(&command).unwrap()
    };
    let end = || in_guest("while kill $(cat /run/qga); do sleep 0.1; done 2>/dev/null; true");
    let agent = socket.display().to_string();
    let program = program.display().to_string();
    let impatient = ["--guest-agent", &agent, "--guest-program", &program];
    // What emulates this guest may take its time.
    let push = [&impatient[..], &["--guest-wait", "4m"]].concat();
    let refused = |args: &[&str]| {
        plug(&daemon, &guest, "probe", args)
            .unwrap_err()
            .to_string()
    };

    // What cannot be installed is told before anything is plugged.
    let said = refused(&["--guest-agent", &agent]);
    assert!(said.contains("it needs libraries"), "{said}");
    let said = refused(&["--guest-agent"]);
    assert!(said.contains("needs the SOCKET"), "{said}");
    assert!(daemon.audit().iter().all(|it| it.kind != "vm"));

    // Nobody answers; the guest's administrator forbids it.
    let said = refused(&impatient);
    assert!(said.contains("no guest agent answers within 6 s"), "{said}");
    let _job = begin("-b guest-exec");
    let said = refused(&push);
    assert!(said.contains("does not allow guest-exec"), "{said}");
    end();

    // Without systemd.
    let job = begin("");
    let said = plug(&daemon, &guest, "probe", &push);
    let said = said.unwrap_or_else(|error| panic!("{error}; {:?}", job.peek(4096)));
    assert!(said.contains("attached already"), "{said}");
    assert!(
        said.contains("/usr/local/bin/vnplug is in the guest ("),
        "{said}"
    );
    assert!(said.contains("until the guest ends"), "{said}");
    eventually("the agent that was installed serves", || {
        guest
            .run("vnplug list", LIMIT)
            .unwrap()
            .text()
            .contains("host:lab")
    });
    let count = in_guest("/usr/local/bin/vnplug count host:lab -c 20");
    assert!(count.contains("20 packets"), "{count}");
    // One that is the same goes on, with its readers.
    let agents = || in_guest("grep -al '^/usr/local/bin/vnplug.agent' /proc/[0-9]*/cmdline");
    let before = agents();
    let said = plug(&daemon, &guest, "probe", &push).unwrap();
    assert!(said.contains("is in the guest already"), "{said}");
    assert_eq!((agents(), before.lines().count()), (before, 1));

    // It complains of half a command before it answers who comes next, and then it is in step.
    let halves: [&[u8]; 4] = [
        br#"{"execute": "guest-pi"#,
        br#"{"execute": "guest-ping""#,
        br#"{"arguments": {"buf-b64": "AAAA"#,
        b"IAAA\", \"handle\": 1000}, \"execute\": \"guest-file-write\"}\n",
    ];
    for half in halves {
        let said = left_behind(&socket, half);
        let complains = |line: &String| {
            ["JSON parse error", "QMP input"]
                .iter()
                .any(|words| line.contains(words))
        };
        assert!(!said.is_empty() && said.iter().all(complains), "{said:?}");
    }
    // One that starts again while it reads a command says that of the rest of ours; it is given all of it anew.
    in_guest("rm /usr/local/bin/vnplug");
    let cut = Cut {
        path: lab.dir().join("cut"),
        agent: &socket,
        restart: &|| {
            in_guest(
                "kill -9 $(cat /run/qga); while kill -0 $(cat /run/qga); do :; done 2>/dev/null; true",
            );
            begin("");
        },
        cuts: Mutex::default(),
        complaints: Mutex::default(),
    };
    let through = cut.path.display().to_string();
    let said = thread::scope(|scope| {
        let serves = scope.spawn(|| cut.serve());
        let last = Last(&cut.path);
        eventually("it listens", || cut.path.exists());
        let args = ["--guest-agent", &through].into_iter();
        let args: Vec<_> = args.chain(push[2..].iter().copied()).collect();
        let said = plug(&daemon, &guest, "probe", &args);
        drop(last);
        serves.join().unwrap();
        said
    });
    let said = said.unwrap_or_else(|error| panic!("{error}"));
    assert!(
        said.contains("/usr/local/bin/vnplug is in the guest ("),
        "{said}"
    );
    // The control.
    let complaints = cut.complaints.into_inner().unwrap();
    let first = complaints.first().map_or("", String::as_str);
    assert!(first.contains("JSON parse error"), "{complaints:?}");

    // With systemd, whose part a script plays.
    in_guest("mkdir -p /run/systemd/system; rm /usr/local/bin/vnplug");
    in_guest("mount -t securityfs none /sys/kernel/security");
    let said = plug(&daemon, &guest, "probe", &push).unwrap();
    assert!(said.contains("runs as vnplug-agent.service"), "{said}");
    assert!(
        said.contains("memory: ivshmem, for the guest's kernel is not locked down"),
        "{said}"
    );
    let asked = in_guest("cat /run/systemctl");
    assert_eq!(
        asked,
        "daemon-reload\nenable vnplug-agent\nrestart vnplug-agent"
    );
    in_guest("rm /run/systemctl");
    plug(&daemon, &guest, "probe", &push).unwrap();
    assert_eq!(in_guest("cat /run/systemctl"), "enable --now vnplug-agent");
    let unit = in_guest("cat /etc/systemd/system/vnplug-agent.service");
    assert!(
        unit.contains("ExecStart=/usr/local/bin/vnplug agent") && unit.contains("Type=simple"),
        "{unit}"
    );

    let left = || in_guest("ls -a /usr/local/bin /etc/systemd/system | grep '[.]new$'; true");
    assert_eq!(left(), "");

    // Who waits is told so, and that the machine is attached. The code tells both from one that refuses.
    let qmp = guest.qmp_path().unwrap();
    let qmp = qmp.to_str().unwrap();
    let attach = |more: &[&str]| {
        let words = [
            "attach", "qemu", "--name", "probe", "--qmp", qmp, "--wait", "0s",
        ];
        daemon.vnplug(&[&words[..], &push, more].concat())
    };
    end();
    let (code, said) = attach(&["--guest-wait", "1h", "--guest-wait", "0s"]);
    assert_eq!(code, Some(8), "{said}");
    assert!(said.contains("the guest does not answer yet"), "{said}");
    let _job = begin("-b guest-exec");
    let (code, said) = attach(&[]);
    assert_eq!(code, Some(7), "{said}");
    end();

    // A guest that starts slowly is waited for, by two who come one after the other then. One that starts again while a file is
    // written is given it anew, and what an earlier boot has left goes.
    in_guest(
        "rm /usr/local/bin/vnplug; cd /usr/local/bin; : >.vnplug.new; : >.vnplug.0badb007.1.new",
    );
    let waits = [1, 2].map(|number| {
        let mut command = daemon.command().unwrap();
        let words = [
            "attach", "qemu", "--name", "probe", "--qmp", qmp, "--wait", "0s",
        ];
        command.args(words).args(&push);
        Running::start(command, &lab, &format!("push{number}")).unwrap()
    });
    for one in &waits {
        eventually("it is told", || {
            one.errors()
                .contains("the guest is waited for, 240 s at most")
        });
    }
    let half = "/usr/local/bin/.vnplug.*.*.new";
    let kills =
        format!("until cat {half} 2>/dev/null | grep -q .; do :; done; kill $(cat /run/qga)");
    let _kills = guest.spawn(&kills).unwrap();
    let _job = begin("");
    let ended = "kill -0 $(cat /run/qga) 2>/dev/null && echo runs; true";
    eventually("it ends while it writes", || in_guest(ended).is_empty());
    // The control: half of a file is there.
    let size = |file: &str| {
        in_guest(&format!("cat {file} | wc -c"))
            .trim()
            .parse::<u64>()
            .unwrap()
    };
    let whole = fs::metadata(push[3]).unwrap().len();
    assert!((1..whole).contains(&size(half)));
    let _job = begin("");
    for mut one in waits {
        let ended = || one.status();
        let ended = until("it is done", ended, Option::is_some).unwrap();
        assert!(ended.success(), "{}{}", one.output(), one.errors());
        assert!(
            one.output().contains("runs as vnplug-agent.service"),
            "{}",
            one.output()
        );
    }
    assert_eq!(size("/usr/local/bin/vnplug"), whole);
    assert_eq!(left(), "");

    // What it says of its kernel is known before anything is plugged: this one, which a file plays, needs memory that
    // the machine has no room for.
    let detach = ["detach", "qemu", "--name", "probe", "--qmp", qmp];
    let (code, text) = daemon.vnplug(&detach);
    assert_eq!(code, Some(0), "{text}");
    in_guest(
        "echo 'none [integrity] confidentiality' >/run/locked; \
         mount --bind /run/locked /sys/kernel/security/lockdown",
    );
    let said = refused(&push);
    assert!(
        said.contains("locked down") && said.contains("maxmem=MORE"),
        "{said}"
    );
    assert!(daemon.audit().iter().all(|it| it.kind != "vm"));
}
