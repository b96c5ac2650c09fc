//! What attached ports cost while nothing happens, and how long it takes to attach many.

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use vnplug::{Next, PortOptions};
use vnplug_e2e::daemon::{Daemon, value};
use vnplug_e2e::{Lab, Netns};

use crate::limit;
use crate::row::{Figure, Limit, Plan, Result, Samples};
use crate::sys;
use crate::uml::AttachedUml;

/// Ports that sleep on a silent wire.
const IDLE_PORTS: usize = 64;
/// Shortest time to measure idleness over.
const IDLE_TIME: Duration = Duration::from_secs(5);
/// Ports to attach and detach.
const PORTS: usize = 1000;
/// Bytes of a ring when nothing else is asked for.
const DEFAULT_RING: u64 = 4 << 20;
/// Longest wait for the daemon to have forgotten all ports.
const PATIENCE: Duration = Duration::from_secs(60);

/// The daemon's share of a CPU while nothing comes: with sleeping ports, then with a guest too.
pub(crate) fn idle(plan: &Plan) -> Result<Vec<Figure>> {
    let lab = Lab::new()?;
    let netns = Netns::new()?;
    // Nothing speaks unasked on this wire.
    netns.enter(|| std::fs::write("/proc/sys/net/ipv6/conf/default/disable_ipv6", "1"))??;
    netns.veth("wire0", "wire1")?;
    let daemon = Daemon::start(&lab, Some(&netns), &["--source", "wire0"])?;
    let mut ports = Vec::new();
    for _ in 0..IDLE_PORTS {
        let mut port = daemon.port("wire0").open()?;
        if !matches!(port.next()?, Next::Nothing) {
            return Err("the silent wire is not silent".into());
        }
        ports.push(port);
    }
    let time = plan.time.max(IDLE_TIME);
    let with_ports = shares(plan, &daemon, time)?;
    let guest = AttachedUml::boot(&lab, &daemon)?;
    let with_guest = shares(plan, &daemon, time)?;
    drop((guest, ports));
    let figure = |name: &str, ours, what: &str| Figure {
        name: name.to_owned(),
        unit: "% of a CPU",
        ours,
        peer: None,
        limit: None,
        note: format!(
            "processor time of all threads of the daemon over {} s: {IDLE_PORTS} ports of a process \
             sleep on an af_packet source of a silent veth{what}",
            time.as_secs_f64()
        ),
    };
    Ok(vec![
        figure("idle-64", with_ports, ""),
        figure(
            "idle-64-uml",
            with_guest,
            ", and a User-mode Linux with its agent is attached",
        ),
    ])
}

fn shares(plan: &Plan, daemon: &Daemon, time: Duration) -> Result<Samples> {
    let mut samples = Samples::default();
    for round in 1..=plan.rounds {
        let (begin, before) = (Instant::now(), cpu_time(daemon.pid())?);
        std::thread::sleep(time);
        let used = cpu_time(daemon.pid())?.saturating_sub(before);
        let share = used.as_secs_f64() / begin.elapsed().as_secs_f64() * 100.0;
        eprintln!("  round {round}: {share:.4} % of a CPU");
        samples.push(share);
    }
    Ok(samples)
}

/// Processor time of all threads, to the nanosecond.
pub(crate) fn cpu_time(pid: u32) -> Result<Duration> {
    let mut nanos = 0;
    for thread in std::fs::read_dir(format!("/proc/{pid}/task"))? {
        let text = std::fs::read_to_string(thread?.path().join("schedstat"))?;
        nanos += text
            .split_whitespace()
            .next()
            .ok_or("an empty schedstat")?
            .parse::<u64>()?;
    }
    Ok(Duration::from_nanos(nanos))
}

/// Seconds until many ports are attached, by one process and by four, and until they are gone.
pub(crate) fn attach(plan: &Plan) -> Result<Vec<Figure>> {
    let mut figures = Vec::new();
    for processes in [1, 4] {
        let [mut on, mut off, mut given, mut taken] = [(); 4].map(|()| Samples::default());
        for round in 1..=plan.rounds {
            let (attached, detached) = attach_once(processes)?;
            eprintln!("  round {round}: attached in {attached:.2} s, detached in {detached:.2} s");
            on.push(attached);
            off.push(detached);
            let (give, take) = limit::memory_s(DEFAULT_RING, PORTS)?;
            given.push(give);
            taken.push(take);
        }
        let figure = |what: &str, ours, limit, how: &str| Figure {
            name: format!("{what}-{PORTS}-by-{processes}"),
            unit: "s",
            ours,
            peer: None,
            limit: Some(Limit::new(limit::MEMORY, limit)),
            note: format!(
                "{PORTS} ports with rings of the default size and a filter of its own each, from \
                 {processes} process(es), while a generator sends 1,000 packets/s; {how}"
            ),
        };
        figures.push(figure("attach", on, given, "until the last one is open"));
        figures.push(figure(
            "detach",
            off,
            taken,
            "from closing until the daemon has none",
        ));
    }
    Ok(figures)
}

fn attach_once(processes: usize) -> Result<(f64, f64)> {
    let lab = Lab::new()?;
    let daemon = Daemon::start(&lab, None, &["--source", "lab=gen,pps=1000"])?;
    let mut clients = Vec::new();
    for client in 0..processes {
        let many = PORTS / processes;
        clients.push(Clients::start(&daemon.socket(), client * many, many)?);
    }
    let begin = Instant::now();
    for client in &mut clients {
        client.say("attach")?;
    }
    for client in &mut clients {
        client.hear("attached")?;
    }
    let attached = begin.elapsed().as_secs_f64();
    let begin = Instant::now();
    for client in &mut clients {
        client.say("detach")?;
    }
    loop {
        let counters = daemon.counters();
        let daemon = counters.iter().find(|counted| counted.kind == "daemon");
        let left = daemon.map_or(0, |counted| value(counted, "ports"));
        if left == 0 {
            return Ok((attached, begin.elapsed().as_secs_f64()));
        }
        if begin.elapsed() > PATIENCE {
            return Err(format!("{left} ports stay").into());
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// A process that attaches ports when told.
struct Clients {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Clients {
    fn start(socket: &Path, first: usize, many: usize) -> Result<Self> {
        let mut child = Command::new(std::env::current_exe()?)
            .args(["child", "attach"])
            .arg(socket)
            .args([first.to_string(), many.to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let input = child.stdin.take().ok_or("no pipe")?;
        let output = BufReader::new(child.stdout.take().ok_or("no pipe")?);
        let mut client = Self {
            child,
            input,
            output,
        };
        client.hear("ready")?;
        Ok(client)
    }

    fn say(&mut self, word: &str) -> Result<()> {
        Ok(writeln!(self.input, "{word}")?)
    }

    fn hear(&mut self, word: &str) -> Result<()> {
        let mut line = String::new();
        self.output.read_line(&mut line)?;
        match line.trim() == word {
            true => Ok(()),
            false => Err(format!("a client says {line:?}, not {word}").into()),
        }
    }
}

impl Drop for Clients {
    fn drop(&mut self) {
        // An error means that it is gone already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The process: one word on its input, one step.
pub(crate) fn client(words: &[String]) -> Result<()> {
    let [socket, first, many] = words else {
        return Err("SOCKET FIRST MANY".into());
    };
    let (socket, first): (PathBuf, usize) = (socket.into(), first.parse()?);
    let many: usize = many.parse()?;
    sys::allow_most_files()?;
    let mut line = String::new();
    println!("ready");
    std::io::stdin().read_line(&mut line)?;
    let mut ports = Vec::new();
    for number in first..first + many {
        let filter = format!("udp and port {}", 1024 + number);
        let options = PortOptions::new("lab").socket(&socket).filter(&filter);
        ports.push(options.open()?);
    }
    println!("attached");
    std::io::stdin().read_line(&mut line)?;
    drop(ports);
    // Stays until it is killed: only closing is measured, not the end of a process.
    std::io::stdin().read_line(&mut line)?;
    Ok(())
}
