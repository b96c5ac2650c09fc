use std::fs::File;
use std::io::{Read, Write};
use std::process::Command;

use super::*;

/// What a confined job may do and what not, as it finds it.
const EXPECTED: &str = "services readable: true
socket: EACCES
netlink or unix socket: EACCES
new file: EACCES
write to a file: EACCES
fork: EACCES
signal: EACCES
prctl: EACCES
memory: refused
busy loop ended by signal 27
";

/// Needs a process with one thread, which this one is not: runs [`probe`] in one of its own.
#[test]
fn a_confined_job_can_read_public_files_and_nothing_else() {
    let output = Command::new(std::env::current_exe().unwrap())
        .args([
            "--ignored",
            "--exact",
            "sys::confine::tests::probe",
            "--test-threads=1",
        ])
        .arg("--nocapture")
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{text}");
    assert!(text.contains(EXPECTED), "{text}");
}

#[test]
#[ignore = "run by a_confined_job_can_read_public_files_and_nothing_else"]
fn probe() {
    // SAFETY: the test harness's other thread only waits, so it holds no lock.
    match unsafe { libc::fork() } {
        0 => {
            let done = catch_unwind(attempt_in_a_service);
            // SAFETY: ends the process.
            unsafe { libc::_exit(i32::from(done.is_err())) }
        }
        pid => assert_eq!(reap(Pid::from_raw(pid).unwrap()).exit_status(), Some(0)),
    }
}

fn attempt_in_a_service() {
    let files = enter_service().unwrap();
    let limits = Limits {
        cpu: Duration::from_millis(50),
        memory_bytes: 64 << 20,
        files,
    };
    let (mut from_job, to_us) = pipe();
    let service = rustix::process::getpid();
    let pid = fork_confined(limits, to_us, |reply| attempt_everything(reply, service)).unwrap();
    let mut report = String::new();
    from_job.read_to_string(&mut report).unwrap();
    assert_eq!(reap(pid).exit_status(), Some(0));
    let (_from_job, to_us) = pipe();
    let pid = fork_confined(limits, to_us, |_| {
        loop {
            std::hint::spin_loop();
        }
    });
    let signal = reap(pid.unwrap()).terminating_signal().unwrap();
    eprintln!("\n{report}busy loop ended by signal {signal}");
}

fn attempt_everything(reply: OwnedFd, service: Pid) {
    let error = |result: io::Result<()>| match result.map_err(|error| error.raw_os_error()) {
        Ok(()) => "possible".to_owned(),
        Err(Some(libc::EACCES)) => "EACCES".to_owned(),
        Err(other) => format!("{other:?}"),
    };
    let kill = || Ok(rustix::process::kill_process(service, Signal::TERM)?);
    let survive = || Ok(rustix::process::set_parent_process_death_signal(None)?);
    let mut huge = Vec::<u8>::new();
    let report = [
        (
            "services readable",
            std::fs::read("/etc/services").is_ok().to_string(),
        ),
        (
            "socket",
            error(std::net::UdpSocket::bind("127.0.0.1:0").map(drop)),
        ),
        (
            "netlink or unix socket",
            error(std::os::unix::net::UnixStream::pair().map(drop)),
        ),
        (
            "new file",
            error(File::create("/tmp/vnplug-confined").map(drop)),
        ),
        (
            "write to a file",
            error(File::options().write(true).open("/dev/null").map(drop)),
        ),
        ("fork", error(single_fork())),
        ("signal", error(kill())),
        ("prctl", error(survive())),
        (
            "memory",
            if huge.try_reserve(65 << 20).is_err() {
                "refused"
            } else {
                "given"
            }
            .to_owned(),
        ),
    ];
    let text: String = report
        .iter()
        .map(|(what, how)| format!("{what}: {how}\n"))
        .collect();
    File::from(reply).write_all(text.as_bytes()).unwrap();
}

fn single_fork() -> io::Result<()> {
    // SAFETY: the process is single-threaded; a child, if there is one, ends at once.
    match unsafe { libc::fork() } {
        -1 => Err(io::Error::last_os_error()),
        // SAFETY: ends the process.
        0 => unsafe { libc::_exit(0) },
        _ => Ok(()),
    }
}

fn pipe() -> (File, OwnedFd) {
    let (from, to) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
    (File::from(from), to)
}

fn reap(pid: Pid) -> rustix::process::WaitStatus {
    let ended = rustix::process::waitpid(Some(pid), rustix::process::WaitOptions::empty());
    ended.unwrap().unwrap().1
}
