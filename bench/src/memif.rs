//! The peer: DPDK's memif between two `dpdk-testpmd`.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::thread::sleep;
use std::time::Duration;

use crate::row::{Plan, Result};

/// The peer's name in the table.
pub(crate) const NAME: &str = "DPDK memif (testpmd)";
/// What exactly the peer does.
pub(crate) const NOTE: &str = "memif: client testpmd txonly (writes the packet's headers into an \
     mbuf from its cache), the driver copies the mbuf into the shared ring, server's driver copies \
     it out into an mbuf, testpmd rxonly frees it; burst 64, buffers 1600 B, ring 1024 (4096 above \
     60 B): the best of bursts 16 to 128, rings 128 to 16384, buffers 1536 to 2048; zero-copy gave \
     no more.";

/// Packets received per microsecond over so many interfaces between the same two processes: the
/// median of the per-second rates that the server prints.
///
/// NB: testpmd 22.11 now and then dies or never connects (a segmentation fault in the server); such
/// a round is repeated, at most twice.
pub(crate) fn measure(plan: &Plan, len: usize, interfaces: usize) -> Result<f64> {
    attempt(plan, len, interfaces)
        .or_else(|_| attempt(plan, len, interfaces))
        .or_else(|_| attempt(plan, len, interfaces))
}

fn attempt(plan: &Plan, len: usize, interfaces: usize) -> Result<f64> {
    let socket = std::env::temp_dir().join(format!("vnplug-bench-{}.sock", std::process::id()));
    let socket = socket
        .to_str()
        .ok_or("the temporary folder's name is not text")?;
    let _ = std::fs::remove_file(socket);
    // Both put their main thread, which only prints, on the CPU of the other's worker.
    // NB: log2 of the ring, the faster one: 60 B 27 Mpps (12: 26), 1514 B 11.8 Mpps (10: 9.1).
    let ring = if len <= 60 { 10 } else { 12 };
    let devices: Vec<String> = (0..interfaces)
        .map(|id| format!("socket={socket},socket-abstract=no,bsize=1600,rsize={ring},id={id}"))
        .collect();
    let mut server = testpmd("server", "0@1,1@0", &devices, &["--forward-mode=rxonly"])?;
    sleep(Duration::from_millis(700));
    let size = format!("--txpkts={len}");
    let _client = testpmd(
        "client",
        "0@0,1@1",
        &devices,
        &["--forward-mode=txonly", &size],
    )?;
    // The first second of traffic is not whole.
    let want = plan.time.as_secs_f64().ceil() as usize + 1;
    let printed = server.rates(interfaces)?;
    let mut rates = Vec::new();
    while rates.len() < want {
        match printed.recv_timeout(PATIENCE) {
            Ok(rate) => rates.push(rate),
            Err(_) => return Err(format!("testpmd printed {} rates only", rates.len()).into()),
        }
    }
    rates.remove(0);
    rates.sort_by(f64::total_cmp);
    Ok(rates[rates.len() / 2] / 1e6)
}

fn testpmd(role: &str, lcores: &str, devices: &[String], extra: &[&str]) -> Result<Testpmd> {
    let devices = devices
        .iter()
        .enumerate()
        .map(|(at, device)| format!("--vdev=net_memif{at},role={role},{device}"));
    let prefix = format!("--file-prefix=vnplug-bench-{role}-{}", std::process::id());
    let eal = [
        "--main-lcore=0",
        "--no-pci",
        "--no-huge",
        "-m",
        "512",
        "--lcores",
        lcores,
    ];
    let pmd = [
        "--nb-cores=1",
        "--burst=64",
        "--total-num-mbufs=8192",
        "--stats-period=1",
    ];
    let child = Command::new("dpdk-testpmd")
        .args(eal)
        .arg(&prefix)
        .args(devices)
        .arg("--")
        .args(pmd)
        .arg("--no-lsc-interrupt")
        .args(extra)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .map_err(|error| format!("dpdk-testpmd (package dpdk): {error}"))?;
    Ok(Testpmd(child))
}

/// A testpmd that does not outlive its measurement.
struct Testpmd(Child);

impl Testpmd {
    /// The receive rates over all interfaces that it prints once a second, from the first packet on.
    fn rates(&mut self, interfaces: usize) -> Result<Receiver<f64>> {
        let pipe = self.0.stdout.take().ok_or("testpmd has no output")?;
        let (printed, rates) = channel();
        std::thread::spawn(move || {
            let lines = BufReader::new(pipe).lines().map_while(|line| line.ok());
            let mut words = lines.filter_map(|line| {
                line.split("Rx-pps:")
                    .nth(1)?
                    .split_whitespace()
                    .next()?
                    .parse::<f64>()
                    .ok()
            });
            // Ends with the process, or when nobody waits any longer.
            while let Some(first) = words.next() {
                let others: f64 = words.by_ref().take(interfaces - 1).sum();
                if first + others > 0.0 && printed.send(first + others).is_err() {
                    return;
                }
            }
        });
        Ok(rates)
    }
}

impl Drop for Testpmd {
    fn drop(&mut self) {
        // An error means that it is gone already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Longest time between two rates, and from the start to the first.
const PATIENCE: Duration = Duration::from_secs(12);
