//! The options of an AF_XDP source, and what is done where there is no XDP.

use std::sync::Arc;

use vnplug_ring::layout::MAX_SNAPLEN;

use super::{LINKTYPE_ETHERNET, Means, Opened, Options};
use crate::hub::SourceProgram;
use vnplug_filter::{Compiler, Program};
use vnplug_frame::Frame;
use vnplug_path::source::af_packet::{AfPacketConfig, Direction, Interface};
use vnplug_path::source::af_xdp::{AfXdp, AfXdpConfig, Mode};
use vnplug_path::source::lent::PacketDir;
use vnplug_path::source::{Queue, QueueCounters, Received, Seen, SourceError, Transmitter, Wake};

pub(super) fn open(
    options: &mut Options<'_>,
    asked: &mut Option<Interface>,
    means: &Means,
    program: Option<&SourceProgram>,
) -> Result<Opened, SourceError> {
    let interface = options
        .take("interface")
        .unwrap_or_else(|| options.name.to_owned());
    let waits = options.waits()?;
    let files = means.files.as_ref();
    let vm = options.left.get("arena").is_some_and(|it| it == "vm");
    if vm && means.is_late {
        return Err(SourceError::new(
            "arena=vm: files that VMs map are made when the daemon starts: put the source into the configuration, and start it again",
        ));
    }
    let (mut config, fallback) = config(options, AfXdpConfig::new(interface), files)?;
    if program.is_some_and(|it| it.program.code().context() != vnplug_twin::Context::Xdp) {
        let what = "the program of an af_xdp source is one with SEC(\"xdp\")";
        return Err(SourceError::new(what));
    }
    config.program = program.map(|it| Arc::clone(&it.program));
    options.done()?;
    *asked = Some(Interface::new(config.interface.clone())?);
    // An XDP program is loaded now or never.
    let is_awaited = waits && fallback && !asked.as_ref().is_some_and(Interface::is_there);
    let own = config.clone();
    let unfit = match is_awaited {
        true => "the interface does not exist yet".to_owned(),
        false if means.is_late && !means.errands.are_done() => match fallback {
            true => TOO_LATE.to_owned(),
            false => return Err(SourceError::new(TOO_LATE)),
        },
        false => match means.errands.run(move || AfXdp::open(own))? {
            Ok(opened) => return Ok(("af_xdp", opened.how, opened.queues, false)),
            Err(unfit) if !fallback || !unfit.xdp_only => return Err(unfit.error),
            Err(unfit) => unfit.to_string(),
        },
    };
    let name = &config.interface;
    log::warn!(
        target: "source",
        "interface {name:?} is received by a packet socket instead of XDP: {unfit}"
    );
    let description = format!("interface {name}, packet socket instead of XDP: {unfit}");
    let interface = config.interface.clone();
    let mut queues = instead(config, is_awaited)?;
    if let Some(program) = program {
        queues = super::programmed::all(queues, program, Some(&interface))?;
    }
    Ok(("af_packet", description, queues, false))
}

/// Why it is not received by XDP.
const TOO_LATE: &str =
    "the daemon gave up the rights for XDP after its start; change_programs = \"on\" keeps them";

/// A configuration with what the options say, and whether a packet socket may do instead.
pub(super) fn config(
    options: &mut Options<'_>,
    mut config: AfXdpConfig,
    files: Option<&PacketDir>,
) -> Result<(AfXdpConfig, bool), SourceError> {
    config.mode = match options.take("mode").as_deref() {
        None | Some("auto") => Mode::Auto,
        Some("zerocopy") => Mode::ZeroCopy,
        Some("native") => Mode::Native,
        Some("generic") => Mode::Generic,
        Some(other) => {
            return Err(options.bad("mode", other, "auto, zerocopy, native or generic"));
        }
    };
    match options.take("queues").as_deref() {
        None | Some("all") => {}
        Some(list) => {
            let numbers = list.split('+').map(|number| number.parse().ok());
            match numbers.collect::<Option<Vec<u32>>>() {
                Some(queues) => config.queues = queues,
                None => {
                    let want = "all, or receive queues joined by +, as 0+2";
                    return Err(options.bad("queues", list, want));
                }
            }
        }
    }
    match options.take("direction").as_deref() {
        None | Some("rx") => {}
        Some(other) => {
            let want = "rx: XDP sees received frames alone (af_packet has both directions)";
            return Err(options.bad("direction", other, want));
        }
    }
    match options.take("timestamps").as_deref() {
        None | Some("frame") => {}
        Some("batch") => config.stamps = false,
        Some(other) => return Err(options.bad("timestamps", other, "frame or batch")),
    }
    config.frames = options.number("frames")?;
    options.size("frame_size", &mut config.frame_size)?;
    options.set("coalesce", &mut config.coalesce_us)?;
    options.set("busy_poll", &mut config.busy_poll_us)?;
    options.switch("promiscuous", &mut config.promiscuous)?;
    options.switch("multi_buffer", &mut config.multi_buffer)?;
    options.switch("early", &mut config.early)?;
    match options.take("arena").as_deref() {
        None | Some("copy") => {}
        Some("umem") => config.lends = true,
        Some("vm") => {
            config.lends = true;
            config.lends_in = files.map(|files| files.of(options.name));
        }
        Some(other) => return Err(options.bad("arena", other, "copy, umem or vm")),
    }
    let fallback = options.flag("fallback")?.unwrap_or(true);
    if let Some(text) = options.take("take") {
        let mut compiler = Compiler::new("/proc/self/exe".into());
        let take = compiler.compile(&text, MAX_SNAPLEN, LINKTYPE_ETHERNET);
        let take =
            take.map_err(|error| options.bad("take", &text, format!("a filter ({error})")))?;
        config.take = Some(Arc::new(take));
    }
    Ok((config, fallback))
}

/// The same frames by packet sockets; the host receives them as well.
fn instead(config: AfXdpConfig, waits: bool) -> Result<Vec<Box<dyn Queue>>, SourceError> {
    let packets = AfPacketConfig {
        direction: Direction::Rx,
        promiscuous: config.promiscuous,
        queues: config.queues.len().max(1) as u32,
        ..AfPacketConfig::new(config.interface)
    };
    let queues = super::af_packet::packets(packets, waits)?;
    let Some(take) = config.take else {
        return Ok(queues);
    };
    Ok(queues
        .into_iter()
        .map(|inner| {
            Box::new(Taken {
                inner,
                take: Arc::clone(&take),
                refused: 0,
            }) as Box<dyn Queue>
        })
        .collect())
}

/// A queue of which only frames that match a filter are handed out; the others are not counted, as
/// those that an XDP program passes to the host are not.
struct Taken {
    inner: Box<dyn Queue>,
    take: Arc<Program>,
    refused: u64,
}

impl Queue for Taken {
    fn receive(&mut self, sink: &mut dyn FnMut(&[Frame<'_>])) -> Result<Received, SourceError> {
        let mut kept = 0;
        let received = self.inner.receive(&mut |frames| {
            let wanted = |frame: &&Frame<'_>| self.take.run(frame.bytes, frame.wire_len) != 0;
            let frames_kept: Vec<Frame<'_>> = frames.iter().filter(wanted).copied().collect();
            kept = frames_kept.len();
            self.refused += (frames.len() - kept) as u64;
            if kept > 0 {
                sink(&frames_kept);
            }
        })?;
        match received {
            // If more is there, the caller does not sleep.
            Received::Frames(_) if kept == 0 => Ok(Received::Nothing),
            Received::Frames(_) => Ok(Received::Frames(kept)),
            other => Ok(other),
        }
    }

    fn arm(&mut self) -> Wake<'_> {
        self.inner.arm()
    }

    fn woke(&mut self, seen: Seen) {
        self.inner.woke(seen);
    }

    fn counters(&mut self) -> QueueCounters {
        let mut counters = self.inner.counters();
        counters.seen -= self.refused.min(counters.seen);
        counters
    }

    fn state(&self) -> &'static str {
        self.inner.state()
    }

    fn is_pressed(&self) -> bool {
        self.inner.is_pressed()
    }

    fn transmitter(&mut self) -> Option<&mut dyn Transmitter> {
        self.inner.transmitter()
    }
}
