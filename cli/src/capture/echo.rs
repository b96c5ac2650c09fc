//! `vnplug echo`: every packet goes back through the device it came from.
//!
//! The generator times the frames it gets back (`echo_p99_ns` and so on in `vnplug stats`): so the
//! latency of a reader is measured with the host's clock at both ends, wherever the reader runs.

use std::path::Path;
use std::time::{Duration, Instant};

use clap::Args;
use serde_json::json;
use vnplug::{Error, Port};

use super::PortArgs;
use crate::failure::{OK, Outcome};
use crate::text::{self, grouped};
use crate::{out, sys};

/// Sends packets back as they are.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  vnplugd --source lab=gen,pps=1000,busy=yes &
  vnplug echo host:lab -t 10s --wait latency --json

On a real wire this sends every packet it sees out again: with a switch in between,
or another of these beside it, that is a loop.
It needs a grant to send; see docs/vnplugd.md.")]
pub(crate) struct Echo {
    #[command(flatten)]
    port: PortArgs,
    /// Size of the transmit ring
    #[arg(long, value_name = "SIZE", default_value = "1M", value_parser = text::size)]
    transmit: u64,
    /// One JSON object at the end
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Default)]
struct Tally {
    echoed: u64,
    no_room: u64,
}

impl Echo {
    pub(crate) fn run(&self, socket: &Path) -> Outcome {
        let options = self.port.options(socket).transmit(self.transmit);
        let mut port = self.port.opened(options.open())?;
        let end = self.port.seconds.map(|seconds| Instant::now() + seconds);
        let mut tally = Tally::default();
        sys::catch_signals();
        let most = self.port.packets.unwrap_or(u64::MAX);
        while tally.echoed + tally.no_room < most && sys::stop().is_none() {
            match turn(&mut port, &mut tally) {
                Ok(()) => {}
                // It reopens while we wait.
                Err(Error::Disconnected) => {}
                Err(error) => return Err(error.into()),
            }
            let left = end.map(|end| end.saturating_duration_since(Instant::now()));
            if left.is_some_and(|left| left.is_zero()) {
                break;
            }
            port.wait(Some(left.unwrap_or(LOOK).min(LOOK)))?;
        }
        let host = port.stats().ok().and_then(|stats| stats.host);
        if self.json {
            let line = json!({
                "summary": true, "echoed": tally.echoed, "no_room": tally.no_room,
                "lost": port.counts().lost, "host": host.as_ref().map(crate::stats::to_json),
            });
            out::raw(&format!("{line}\n"))?;
        } else {
            out::line(&format!(
                "{} packets sent back, {} dropped for want of room, {} lost before",
                grouped(tally.echoed),
                grouped(tally.no_room),
                grouped(port.counts().lost)
            ))?;
        }
        Ok(OK)
    }
}

/// Sends back what is there. Batches as they come: what came alone goes back at once.
fn turn(port: &mut Port, tally: &mut Tally) -> Result<(), Error> {
    loop {
        let (batch, outbox) = port.batch_and_outbox(BATCH)?;
        let mut taken = 0;
        for packet in batch {
            taken += 1;
            match outbox.push(packet?.bytes)? {
                true => tally.echoed += 1,
                false => tally.no_room += 1,
            }
        }
        if taken == 0 {
            return Ok(());
        }
        outbox.flush();
    }
}

const BATCH: usize = 64;
/// How often signals and the clock are looked at.
const LOOK: Duration = Duration::from_millis(50);
