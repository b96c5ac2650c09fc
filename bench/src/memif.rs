//! The peer: DPDK's memif between two `dpdk-testpmd`.

use std::io::Read;
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::Duration;

use crate::row::{Plan, Result};

/// The peer's name in the table.
pub(crate) const NAME: &str = "DPDK memif (testpmd)";
/// What exactly the peer does.
pub(crate) const NOTE: &str = "memif: client testpmd txonly (writes the packet's headers into an \
     mbuf from its cache), the driver copies the mbuf into the shared ring, server's driver copies \
     it out into an mbuf, testpmd rxonly frees it; burst 64, ring 1024, buffers 1600 B (the best \
     of the bursts 16 to 128, rings 128 to 4096, buffers 1536 to 2048 and zero-copy tried).";

/// Packets received per microsecond: the median of the per-second rates that the server prints.
///
/// NB: testpmd 22.11 now and then dies or never connects (a segmentation
/// fault in the server); such a round is repeated, at most twice.
pub(crate) fn measure(plan: &Plan, len: usize) -> Result<f64> {
    attempt(plan, len)
        .or_else(|_| attempt(plan, len))
        .or_else(|_| attempt(plan, len))
}

fn attempt(plan: &Plan, len: usize) -> Result<f64> {
    let socket = std::env::temp_dir().join(format!("vnplug-bench-{}.sock", std::process::id()));
    let socket = socket
        .to_str()
        .ok_or("the temporary folder's name is not text")?;
    let _ = std::fs::remove_file(socket);
    // Both put their main thread, which only prints, on the CPU of the other's worker.
    let mut server = testpmd("server", "0@1,1@0", socket, &["--forward-mode=rxonly"])?;
    sleep(Duration::from_millis(700));
    let size = format!("--txpkts={len}");
    let client = testpmd(
        "client",
        "0@0,1@1",
        socket,
        &["--forward-mode=txonly", &size],
    )?;
    // Starting takes a second, the first second of traffic is not whole.
    sleep(plan.time + Duration::from_secs(3));
    drop(client);
    let text = server.output()?;
    let mut rates: Vec<f64> = text
        .lines()
        .filter_map(|line| {
            line.split("Rx-pps:")
                .nth(1)?
                .split_whitespace()
                .next()?
                .parse()
                .ok()
        })
        .filter(|rate| *rate > 0.0)
        .collect();
    if rates.len() < 2 {
        return Err(format!("testpmd printed too few rates:\n{text}").into());
    }
    rates.remove(0);
    rates.sort_by(f64::total_cmp);
    Ok(rates[rates.len() / 2] / 1e6)
}

fn testpmd(role: &str, lcores: &str, socket: &str, extra: &[&str]) -> Result<Testpmd> {
    let device =
        format!("--vdev=net_memif0,role={role},socket={socket},socket-abstract=no,bsize=1600,id=0");
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
        .args([&prefix, &device, "--"])
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
    /// Ends it and returns what it printed, a few kilobytes that the pipe holds.
    fn output(&mut self) -> Result<String> {
        self.0.kill()?;
        let mut bytes = Vec::new();
        if let Some(pipe) = &mut self.0.stdout {
            pipe.read_to_end(&mut bytes)?;
        }
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }
}

impl Drop for Testpmd {
    fn drop(&mut self) {
        // An error means that it is gone already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
