//! The smallest application of libpcap: counts what `pcap_dispatch` hands it.
//!
//! A process of its own that loads `libpcap.so.0.8` as any program does: where `LD_LIBRARY_PATH`
//! says so, it gets the drop-in, else the system's library.

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, ChildStdout, Command, Stdio};

use rustix::process::{Pid, Signal, kill_process};

use super::library::Library;
use crate::row::Result;

/// The words that start it: `child pcap-count DEVICE [FILTER]`.
pub(super) const NAME: &str = "pcap-count";
/// What it prints when it captures.
pub(super) const READY: &str = "ready";

/// The process: captures from a device until SIGINT.
pub(crate) fn child(words: &[String]) -> Result<()> {
    let (device, filter) = match words {
        [device] => (device, ""),
        [device, filter] => (device, filter.as_str()),
        _ => return Err("DEVICE [FILTER]".into()),
    };
    let mut capture = Library::load()?.open(device, filter)?;
    println!("{READY}");
    let mut packets = 0;
    while let Some(taken) = capture.dispatch()? {
        packets += taken;
    }
    println!("{packets}");
    Ok(())
}

/// Reads what a counter prints at its end: the packets that its callback got.
pub(super) fn parse(output: &str) -> Result<u64> {
    let last = output.lines().last().and_then(|line| line.parse().ok());
    last.ok_or_else(|| format!("the counter said {output:?}").into())
}

/// A child process of ours that says something once it captures.
pub(super) struct Listener {
    child: Child,
    output: BufReader<ChildStdout>,
}

impl Listener {
    /// Starts it and waits for its word.
    pub(super) fn start(mut command: Command) -> Result<Self> {
        let mut child = command.stdout(Stdio::piped()).spawn()?;
        let stdout = child.stdout.take().ok_or("no pipe")?;
        let mut listener = Self {
            child,
            output: BufReader::new(stdout),
        };
        let mut line = String::new();
        while listener.output.read_line(&mut line)? > 0 {
            if line.contains(READY) || line.contains("listening on") {
                return Ok(listener);
            }
            line.clear();
        }
        Err(format!("it ended before it captured: {:?}", listener.child.wait()?).into())
    }

    pub(super) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Interrupts it; everything it says until it ends.
    pub(super) fn end(mut self) -> Result<String> {
        let pid = Pid::from_raw(self.pid().cast_signed()).ok_or("no process")?;
        kill_process(pid, Signal::INT)?;
        let mut rest = String::new();
        self.output.read_to_string(&mut rest)?;
        self.child.wait()?;
        Ok(rest)
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        // An error means that it is gone already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_line_is_the_result() {
        assert_eq!(parse("ready\n7\n").unwrap(), 7);
        assert!(parse("").is_err());
        assert!(parse("cannot open").is_err());
    }
}
