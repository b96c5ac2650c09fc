//! The machines: one with the switches, one far away, and the guests.

use std::fmt;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use vnplug_e2e::daemon::Daemon;
use vnplug_e2e::station::{Running, Station};
use vnplug_e2e::{Lab, Netns};

use crate::row::Result;

/// `upN` here and `farN` there are a wire: 0 is ours, 1 the peer's, 2 a bridge's.
pub(super) struct Site {
    pub(super) lab: Lab,
    here: Netns,
    pub(super) far: Netns,
}

/// The daemon with its guest.
pub(super) struct Ours {
    pub(super) daemon: Daemon,
    pub(super) station: Station,
}

/// `vde_switch` and `vde_pcapplug` with their guest.
pub(super) struct Peer {
    pub(super) station: Station,
    pub(super) plug: Running,
    pub(super) switch: Running,
}

/// What is counted beside the rate.
#[derive(Clone, Copy, Default)]
pub(super) struct Told {
    /// IP packets that were cut off, at the guest (`IpExtInTruncatedPkts`).
    truncated: u64,
    /// Segments that the far machine sent again (`TcpRetransSegs`).
    again: u64,
    /// Frames longer than 1518 bytes that the switch's kernel handed over.
    long: u64,
}

impl Site {
    pub(super) fn new() -> Result<Self> {
        let site = Self {
            lab: Lab::new()?,
            here: Netns::new()?,
            far: Netns::new()?,
        };
        for wire in 0..3 {
            let [up, far] = ["up", "far"].map(|it| format!("{it}{wire}"));
            let peer = ["peer", "name", &far, "netns", site.far.name()];
            let veth = ["link", "add", &up, "type", "veth"];
            site.here.ip(&[&veth[..], &peer].concat())?;
            let address = format!("{}/24", far_address(wire));
            site.far.ip(&["addr", "add", &address, "dev", &far])?;
            site.far.ip(&["link", "set", &far, "up"])?;
            site.here.ip(&["link", "set", &up, "up"])?;
        }
        Ok(site)
    }

    /// Lets 100 Mbit/s through each way.
    pub(super) fn shape(&self) -> Result<()> {
        for wire in 0..2 {
            for (netns, name) in [(&self.here, "up"), (&self.far, "far")] {
                let device = format!("{name}{wire}");
                let add = ["tc", "qdisc", "add", "dev", &device, "root", "tbf"];
                let rate = ["rate", "100mbit", "burst", "16kb", "latency", "50ms"];
                netns.exec(&[&add[..], &rate].concat())?;
            }
        }
        Ok(())
    }

    /// What the far machine's stack leaves to be cut, and whether the kernel here merges. Checksums are
    /// filled, as on a real wire.
    pub(super) fn offloads(&self, gso: bool, gro: bool) -> Result<()> {
        let word = |on| if on { "on" } else { "off" };
        for wire in 0..3 {
            let [up, far] = ["up", "far"].map(|it| format!("{it}{wire}"));
            self.far
                .exec(&["ethtool", "-K", &far, "tx", "off", "gso", word(gso)])?;
            self.here.exec(&["ethtool", "-K", &up, "gro", word(gro)])?;
        }
        Ok(())
    }

    pub(super) fn ours(&self) -> Result<Ours> {
        let dir = self.lab.dir().join("lan0.ctl");
        let spec = format!("lan0,vde={},uplink=up0", dir.display());
        let daemon = Daemon::start(&self.lab, Some(&self.here), &["--switch", &spec])?;
        let station = Station::by_vde(&self.lab, &dir, "10.9.0.7")?;
        Ok(Ours { daemon, station })
    }

    /// NB: `vde_pcapplug` opens libpcap with a time-out of 0, which with TPACKET_V3 (libpcap 1.5 and later) means
    /// to wait until a block of 256 KiB is full: no ping is answered. Here it asks for 1 ms.
    pub(super) fn peer(&self) -> Result<Peer> {
        let shim = self.lab.dir().join("shim.so");
        self.compile(&shim, SHIM, &["-shared", "-fPIC"])?;
        let dir = self.lab.dir().join("vde.ctl");
        let switch = Running::vde_switch(&self.lab, Some(&self.here), &dir, &[])?;
        let mut plug = self.here.command("vde_pcapplug");
        plug.arg("-s").arg(&dir).arg("up1");
        plug.env("LD_PRELOAD", &shim);
        let plug = Running::start(plug, &self.lab, "vde_pcapplug")?;
        let station = Station::by_vde(&self.lab, &dir, "10.9.1.7")?;
        Ok(Peer {
            station,
            plug,
            switch,
        })
    }

    /// A daemon with this wire as its uplink, of this kind, and a guest by rings that gives and takes single frames.
    pub(super) fn engine(&self, wire: usize, kind: &str) -> Result<Ours> {
        let spec = format!("lan0,uplink=up{wire}{kind}");
        let daemon = Daemon::start(&self.lab, Some(&self.here), &["--switch", &spec])?;
        let (address, wire_only) = (format!("10.9.{wire}.7"), ["--segments", "wire"]);
        let station = Station::by_nic(&self.lab, &daemon, "lan0", &address, &wire_only)?;
        Ok(Ours { daemon, station })
    }

    /// What reads and writes each frame, between this wire and a TAP, which is the only interface of a namespace.
    pub(super) fn read_and_write(&self, wire: usize) -> Result<(Running, Netns)> {
        let program = self.lab.dir().join("read-and-write");
        self.compile(&program, READ_AND_WRITE, &["-O2"])?;
        let mut command = self.here.command(&program);
        command.arg(format!("up{wire}")).arg("rw0");
        let mut running = Running::start(command, &self.lab, "read-and-write")?;
        let begin = Instant::now();
        while self.here.ip(&["link", "show", "rw0"]).is_err() {
            if running.status().is_some() || begin.elapsed() > PATIENCE {
                return Err("no TAP is made (modprobe tun)".into());
            }
            std::thread::sleep(PATIENCE / 500);
        }
        let guest = Netns::new()?;
        self.here
            .ip(&["link", "set", "rw0", "netns", guest.name()])?;
        let address = format!("{PLAIN}/24");
        guest.ip(&["addr", "add", &address, "dev", "rw0"])?;
        guest.ip(&["link", "set", "rw0", "up"])?;
        Ok((running, guest))
    }

    fn compile(&self, program: &Path, text: &str, options: &[&str]) -> Result<()> {
        let source = program.with_extension("c");
        std::fs::write(&source, text)?;
        let mut cc = Command::new("cc");
        cc.args(options)
            .arg("-o")
            .arg(program)
            .arg(&source)
            .arg("-ldl");
        match cc.status()?.success() {
            true => Ok(()),
            false => Err(format!("cc cannot compile {}", source.display()).into()),
        }
    }

    /// A namespace by a veth on a bridge with the third wire.
    pub(super) fn bridged(&self) -> Result<Netns> {
        let guest = Netns::new()?;
        let veth = ["link", "add", "br-guest", "type", "veth"];
        let peer = ["peer", "name", "eth0", "netns", guest.name()];
        self.here.ip(&[&veth[..], &peer].concat())?;
        self.here.bridge("br0", &["up2", "br-guest"])?;
        self.here.ip(&["link", "set", "br-guest", "up"])?;
        let address = format!("{BRIDGED}/24");
        guest.ip(&["addr", "add", &address, "dev", "eth0"])?;
        guest.ip(&["link", "set", "eth0", "up"])?;
        Ok(guest)
    }

    /// Begins to count long frames that arrive.
    pub(super) fn watch_long(&self, wire: usize) -> Result<Running> {
        let mut tcpdump = self.here.command("tcpdump");
        tcpdump.args(["-Q", "in", "-nn", "-s", "64", "-w", "/dev/null", "-i"]);
        tcpdump.arg(format!("up{wire}")).arg("greater 1519");
        Ok(Running::start(tcpdump, &self.lab, "tcpdump")?)
    }

    /// What is counted so far.
    pub(super) fn told(&self, station: &Station) -> Result<Told> {
        Ok(Told {
            truncated: counter(&station.netns, "IpExtInTruncatedPkts")?,
            again: counter(&self.far, "TcpRetransSegs")?,
            long: 0,
        })
    }
}

/// How many long frames were seen.
pub(super) fn long_frames(mut tcpdump: Running) -> u64 {
    tcpdump.finish();
    let said = tcpdump.errors();
    let line = said.lines().find(|line| line.ends_with("captured"));
    let count = line.and_then(|line| line.split_whitespace().next());
    count.and_then(|count| count.parse().ok()).unwrap_or(0)
}

/// A counter of a namespace's kernel.
fn counter(netns: &Netns, name: &str) -> Result<u64> {
    let text = netns.exec(&["nstat", "-asz", name])?;
    let line = text.lines().find(|line| line.starts_with(name));
    let count = line.and_then(|line| line.split_whitespace().nth(1));
    Ok(count.ok_or("nstat: no such counter")?.parse()?)
}

/// Frames that the far machine has sent and received by a wire.
pub(super) fn far_frames(far: &Netns, wire: usize) -> Result<u64> {
    let mut frames = 0;
    for way in ["rx", "tx"] {
        let file = format!("/sys/class/net/far{wire}/statistics/{way}_packets");
        frames += far.exec(&["cat", &file])?.trim().parse::<u64>()?;
    }
    Ok(frames)
}

/// The far machine's address on a wire.
pub(super) fn far_address(wire: usize) -> String {
    format!("10.9.{wire}.2")
}

impl Told {
    pub(super) fn since(&self, before: &Self) -> Self {
        Self {
            truncated: self.truncated - before.truncated,
            again: self.again - before.again,
            long: 0,
        }
    }

    pub(super) fn add(&mut self, other: &Self, long: u64) {
        self.truncated += other.truncated;
        self.again += other.again;
        self.long += long;
    }
}

impl fmt::Display for Told {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            truncated,
            again,
            long,
        } = self;
        write!(
            f,
            "{long} frames above 1518 B, {truncated} packets cut off at the guest, {again} segments sent again"
        )
    }
}

/// The guest on the bridge.
pub(super) const BRIDGED: &str = "10.9.2.7";
/// The guest behind a program that reads and writes; never beside the other.
pub(super) const PLAIN: &str = "10.9.2.8";
const PATIENCE: Duration = Duration::from_secs(10);

const READ_AND_WRITE: &str = r#"
#include <arpa/inet.h>
#include <fcntl.h>
#include <linux/if_packet.h>
#include <linux/if_tun.h>
#include <net/ethernet.h>
#include <net/if.h>
#include <poll.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>
int main(int argc, char **argv) {
    if (argc != 3) return 2;
    struct ifreq tap = { .ifr_flags = IFF_TAP | IFF_NO_PI };
    strncpy(tap.ifr_name, argv[2], IFNAMSIZ - 1);
    int guest = open("/dev/net/tun", O_RDWR);
    if (guest < 0 || ioctl(guest, TUNSETIFF, &tap)) return 1;
    int wire = socket(AF_PACKET, SOCK_RAW, 0);
    struct sockaddr_ll at = { .sll_family = AF_PACKET, .sll_protocol = htons(ETH_P_ALL) };
    at.sll_ifindex = if_nametoindex(argv[1]);
    struct packet_mreq all = { .mr_ifindex = at.sll_ifindex, .mr_type = PACKET_MR_PROMISC };
    int yes = 1, room = 32 << 20;
    if (setsockopt(wire, SOL_PACKET, PACKET_IGNORE_OUTGOING, &yes, sizeof yes)
        || setsockopt(wire, SOL_SOCKET, SO_RCVBUFFORCE, &room, sizeof room)
        || setsockopt(wire, SOL_PACKET, PACKET_ADD_MEMBERSHIP, &all, sizeof all)
        || bind(wire, (struct sockaddr *) &at, sizeof at)) return 1;
    struct pollfd both[2] = { { wire, POLLIN, 0 }, { guest, POLLIN, 0 } };
    static char frame[65536];
    while (poll(both, 2, -1) > 0)
        for (int from = 0; from < 2; from++)
            if (both[from].revents) {
                ssize_t len = read(both[from].fd, frame, sizeof frame);
                /* What is not taken is dropped, as by a switch. */
                if (len > 0 && write(both[1 - from].fd, frame, len) < 0) continue;
            }
    return 1;
}
"#;

const SHIM: &str = r#"
#define _GNU_SOURCE
#include <dlfcn.h>
void *pcap_open_live(const char *device, int snaplen, int promiscuous, int ms, char *error) {
    void *(*real)(const char *, int, int, int, char *) = dlsym(RTLD_NEXT, "pcap_open_live");
    return real(device, snaplen, promiscuous, ms ? ms : 1, error);
}
"#;
