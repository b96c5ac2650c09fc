//! In User-mode Linux: a bare counter over vNPlug, against the same over the guest's own NIC.
//!
//! A guest boots for every turn, so that nothing of the other side runs meanwhile. What a guest
//! costs is the host's processor time of all its processes, its kernel's included.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use vnplug_e2e::daemon::Daemon;
use vnplug_e2e::{Guest, Image, Lab, Uml, UmlConfig};

use super::counter::{self, READY};
use super::{COST, LIBRARY, Load, Turn, Turns, Wire, drop_in};
use crate::attached::cpu_time;
use crate::handoff::Reading;
use crate::row::{Figure, Plan, Result};
use crate::uml::AttachedUml;

/// What the counter in the guest asks for.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Wanted {
    Everything,
    /// One packet in [`FLOWS`].
    Little,
}

/// The counter's cost and loss in the guest.
pub(crate) fn in_uml(plan: &Plan) -> Result<Vec<Figure>> {
    let wire = Wire::new()?;
    let (mut steady, mut flat_out) = (Turns::default(), Turns::default());
    for round in 1..=plan.rounds {
        for (load, turns) in [
            (Load::Steady(STEADY_PPS), &mut steady),
            (Load::FlatOut, &mut flat_out),
        ] {
            let ours = over_vnplug(plan, &wire, Wanted::Everything, load)?;
            let nic = over_nic(plan, &wire, Wanted::Everything, load)?;
            eprintln!(
                "  round {round}: vNPlug {}; NIC {}",
                told(&ours),
                told(&nic)
            );
            turns.ours.push(ours);
            turns.theirs.push(nic);
        }
        steady.push_bare(plan, 60, Reading::Header)?;
    }
    let how = "60-byte frames on a veth; pcap_dispatch in User-mode Linux, over the drop-in and \
               over the system's libpcap on the guest's NIC (vector driver, raw transport)";
    Ok(vec![
        steady.bounded(
            steady.figure(
                "pcap-uml-60".into(),
                COST,
                Turn::own_cost,
                NIC,
                format!("host's processor time of the guest at {STEADY_PPS} packets/s; {how}"),
            ),
            1.0,
        ),
        steady.bounded(
            steady.figure(
                "pcap-uml-60-whole".into(),
                COST,
                Turn::whole_cost,
                NIC,
                format!("the same with the daemon's; {how}"),
            ),
            2.0,
        ),
        flat_out.figure(
            "pcap-uml-60-loss".into(),
            "% lost",
            Turn::lost_percent,
            NIC,
            format!("lost of what the sender sent flat out; {how}"),
        ),
    ])
}

/// What the guest pays for packets that it does not want.
pub(crate) fn filtered(plan: &Plan) -> Result<Vec<Figure>> {
    let wire = Wire::new()?;
    let load = Load::Flows(STEADY_PPS, FLOWS);
    let (mut against_nic, mut against_all) = (Turns::default(), Turns::default());
    for round in 1..=plan.rounds {
        let ours = over_vnplug(plan, &wire, Wanted::Little, load)?;
        let nic = over_nic(plan, &wire, Wanted::Little, load)?;
        let all = over_vnplug(plan, &wire, Wanted::Everything, load)?;
        eprintln!(
            "  round {round}: vNPlug {}; NIC {}; vNPlug without a filter {}",
            told(&ours),
            told(&nic),
            told(&all)
        );
        against_nic.ours.push(ours);
        against_nic.theirs.push(nic);
        against_all.ours.push(ours);
        against_all.theirs.push(all);
    }
    let on_the_wire: fn(&Turn) -> f64 = |turn| turn.own_s * 1e6 / turn.sent.max(1) as f64;
    let note = format!(
        "host's processor time of the guest per million packets on the wire, of which {FILTER:?} \
         wants one in {FLOWS}; 60-byte frames, {STEADY_PPS} a second, pcap_dispatch in User-mode \
         Linux"
    );
    Ok(vec![
        against_nic.figure(
            "pcap-uml-filtered".into(),
            WIRE_COST,
            on_the_wire,
            NIC,
            note.clone(),
        ),
        against_all.figure(
            "pcap-uml-filtered-all".into(),
            WIRE_COST,
            on_the_wire,
            "vNPlug, no filter",
            note,
        ),
    ])
}

fn told(turn: &Turn) -> String {
    let (own, whole) = (turn.own_cost(), turn.whole_cost());
    let (got, sent) = (turn.captured, turn.sent);
    format!("{own:.3} ({whole:.3}) CPU s/Mpkt, {got} of {sent} packets")
}

fn over_vnplug(plan: &Plan, wire: &Wire, wanted: Wanted, load: Load) -> Result<Turn> {
    let daemon = Daemon::start(&wire.lab, Some(&wire.netns), &["--source", "wire0"])?;
    let attached = AttachedUml::boot_with(&wire.lab, &daemon, image(&wire.lab)?)?;
    let before = cpu_time(daemon.pid())?;
    let command = "LD_LIBRARY_PATH=/lib/vnplug exec counter child pcap-count host:wire0";
    let mut turn = count(plan, wire, attached.guest(), command, wanted, load)?;
    turn.daemon_s = (cpu_time(daemon.pid())? - before).as_secs_f64();
    Ok(turn)
}

fn over_nic(plan: &Plan, wire: &Wire, wanted: Wanted, load: Load) -> Result<Turn> {
    let config = UmlConfig {
        nics: vec!["wire0".into()],
        netns: Some(wire.netns.name().to_owned()),
        image: image(&wire.lab)?,
        kernel_args: vec!["ipv6.disable=1".into()],
        ..UmlConfig::default()
    };
    let guest = Uml::boot(&wire.lab, config)?;
    let up = guest.run("ip link set vec0 promisc on up", LIMIT)?;
    if !up.success() {
        return Err(up.text().into());
    }
    let command = "exec counter child pcap-count vec0";
    count(plan, wire, &guest, command, wanted, load)
}

/// Starts the counter in the guest, sends, and reads what it saw.
fn count(
    plan: &Plan,
    wire: &Wire,
    guest: &Guest,
    command: &str,
    wanted: Wanted,
    load: Load,
) -> Result<Turn> {
    let filter = match wanted {
        Wanted::Everything => "",
        Wanted::Little => FILTER,
    };
    let job = guest.spawn(&format!("{command} '{filter}'"))?;
    let deadline = Instant::now() + LIMIT;
    while !job.peek(1000)?.contains(READY) {
        if job.is_done() || Instant::now() > deadline {
            return Err(format!("the counter in the guest: {}", job.peek(1000)?).into());
        }
        thread::sleep(Duration::from_millis(20));
    }
    let before = guest.cpu_time();
    let frames = load.pps().map_or(FLAT_OUT_PPS, std::num::NonZeroU64::get);
    let frames = (frames as f64 * plan.time.as_secs_f64()) as u64;
    let sent = wire.send(frames, 60, load)?;
    thread::sleep(QUIET);
    let own = guest.cpu_time() - before;
    job.signal("INT")?;
    let captured = counter::parse(&job.wait(LIMIT)?.text())?;
    Ok(Turn {
        sent: sent.frames,
        captured,
        own_s: own.as_secs_f64(),
        daemon_s: 0.0,
    })
}

/// The counter, both libraries, and what they need.
///
/// NB: without their debug information, which would not leave a guest of 128 MiB the memory to boot.
pub(crate) fn image(lab: &Lab) -> Result<Image> {
    let counter = stripped(lab, &std::env::current_exe()?, "counter")?;
    let drop_in = stripped(lab, &drop_in(lab)?.join(LIBRARY), "drop-in")?;
    let real = "/usr/lib/x86_64-linux-gnu/libpcap.so.0.8";
    Ok(Image::default()
        .program_at(counter, "/bin/counter")
        .program_at(drop_in, "/lib/vnplug/libpcap.so.0.8")
        .program_at(real, real))
}

/// A file without its debug information, made once.
pub(crate) fn stripped(lab: &Lab, file: &Path, name: &str) -> Result<PathBuf> {
    let to = lab.dir().join(name);
    if !to.exists() {
        let mut strip = Command::new("strip");
        strip.arg("--strip-unneeded").arg("-o").arg(&to).arg(file);
        match strip.status() {
            Ok(status) if status.success() => {}
            status => return Err(format!("strip (package binutils): {status:?}").into()),
        }
    }
    Ok(to)
}

const NIC: &str = "the guest's own NIC";
const WIRE_COST: &str = "CPU s/M on wire";
/// A rate that the guest's NIC just bears.
const STEADY_PPS: u64 = 50_000;
/// About what the sender reaches; decides only how many frames a turn has.
const FLAT_OUT_PPS: u64 = 1_000_000;
const FLOWS: u32 = 1000;
/// The witness frames' first flow.
const FILTER: &str = "udp src port 49152";
/// After the last packet: longer than every read timeout.
const QUIET: Duration = Duration::from_millis(1500);
const LIMIT: Duration = Duration::from_secs(60);
