//! A program that nobody here wrote, unchanged, in a guest: tcpdump prints the host's wire.

use super::wire::{FAR, until};
use super::{LIMIT, Stage};
use crate::daemon::program;
use crate::error::{LabError, Result};
use crate::guest::Guest;
use crate::image::Image;

/// tcpdump as the distribution ships it, and vNPlug's libpcap.
pub(super) fn image(image: Image) -> Result<Image> {
    let image = image.program("/usr/bin/tcpdump");
    let library = program("libvnplug_pcap.so")?;
    Ok(image.program_at(library, format!("{LIBRARIES}/libpcap.so.0.8")))
}

/// Lets tcpdump in a guest print a few packets of the wire, and shows what it was told and said.
pub(super) fn tcpdump(stage: &Stage, guest: &Guest) -> Result<()> {
    stage.say("  unmodified tcpdump in the guest, by vNPlug's libpcap:");
    stage.wire.far_end(true)?;
    let filter = "icmp or udp port 53 or tcp[tcpflags] & (tcp-syn|tcp-fin) != 0";
    // The guest has no user tcpdump, to whom it would hand over otherwise.
    let command = format!(
        "LD_LIBRARY_PATH={LIBRARIES} tcpdump -Z root -l -n -i host:wire -c {PACKETS} '{filter}'"
    );
    println!("            guest# {command}");
    let job = guest.spawn(&command)?;
    let ended = |text: String| LabError::Command {
        command: command.clone(),
        text,
    };
    until("tcpdump in the guest listens", || match job.is_done() {
        true => Err(ended(job.wait(LIMIT)?.text())),
        false => Ok(job.peek(2000)?.contains("listening on")),
    })?;
    let talk = format!(
        "ping -q -c 2 -i 0.05 {FAR}; dig +tries=3 @{FAR} host1.demo; curl -sf http://{FAR}/page.html"
    );
    stage.wire.near.exec(&["sh", "-ec", &talk])?;
    let output = job.wait(LIMIT)?;
    if !output.success() {
        return Err(ended(output.text()));
    }
    let text = output.text();
    let lines: Vec<&str> = text.lines().filter(|line| !line.is_empty()).collect();
    for line in &lines[lines.len().saturating_sub(PACKETS + 3)..] {
        let line: String = line.chars().take(96).collect();
        println!("            {line}");
    }
    Ok(())
}

/// Two pings and a query with their answers, and a connection's first packets and last.
const PACKETS: usize = 9;
const LIBRARIES: &str = "/usr/lib/vnplug";
