//! What the tutorials tell a reader to type, typed, on the host and in a virtual machine.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs;
use std::num::NonZeroU64;
use std::path::Path;
use std::process::Output;
use std::time::Duration;

use vnplug_e2e::attached::image;
use vnplug_e2e::daemon::{Daemon, program};
use vnplug_e2e::third_party::library_dir;
use vnplug_e2e::traffic::Stream;
use vnplug_e2e::typed::{self, Shell};
use vnplug_e2e::{Guest, Image, Lab, Netns, Qemu, QemuConfig};
use vnplug_testing::{PATIENCE, until};

/// A machine where only the programs are, with a daemon that has no source, and where nobody else's interfaces are.
struct Stage {
    lab: Lab,
    daemon: Daemon,
    netns: Netns,
}

impl Stage {
    fn new() -> Self {
        let lab = Lab::new().unwrap();
        let netns = Netns::new().unwrap();
        let daemon = Daemon::start(&lab, Some(&netns), &[]).unwrap();
        fs::create_dir(lab.dir().join("here")).unwrap();
        Self { lab, daemon, netns }
    }

    fn run(&self, script: &str) -> (Output, String) {
        let programs = program("vnplug").unwrap();
        let shell = Shell {
            dir: &self.lab.dir().join("here"),
            socket: &self.daemon.socket(),
            programs: &[programs.parent().unwrap()],
            netns: Some(&self.netns),
        };
        let output = shell.run(script);
        let (told, noted) = (&output.stdout, &output.stderr);
        let said = format!(
            "{}\n{}",
            String::from_utf8_lossy(told),
            String::from_utf8_lossy(noted)
        );
        (output, said)
    }
}

/// The blocks of a page with this mark, as one script.
fn script(page: &str, mark: &str) -> String {
    let blocks = typed::fenced(page).into_iter();
    blocks
        .filter(|(info, _)| *info == mark)
        .map(|(_, text)| text)
        .collect()
}

#[test]
fn a_sensor_records_and_is_asked_from_elsewhere() {
    let stage = Stage::new();
    let page = typed::page("docs/tutorials/recorder.md");
    // The other machine is this one; the directory is on a disk.
    let disk = stage.lab.dir().join("srv");
    fs::create_dir(&disk).unwrap();
    let before = format!(
        "mount --bind {} /srv\nssh() {{ shift; sh -c \"$*\"; }}\n",
        disk.display()
    );
    let (output, said) = stage.run(&(before + &script(&page, "sh host")));
    assert!(output.status.success(), "{said}");
    assert!(said.contains("durable up to packet"), "{said}");
    assert_eq!(said.matches("IP 10.0.0.7.").count(), 3, "{said}");
    // The flows, and packets from the page.
    assert!(said.contains(" > 198.18.0.1 9\n"), "{said}");
    assert!(said.matches("IP 10.0.0.").count() >= 6, "{said}");
}

#[test]
fn a_night_is_looked_into() {
    let stage = Stage::new();
    let page = typed::page("docs/tutorials/night.md");
    let (output, said) = stage.run(&script(&page, "sh host"));
    assert!(output.status.success(), "{said}");
    let picture = fs::read_to_string(stage.lab.dir().join("here/night.svg")).unwrap();
    assert!(picture.contains("packets"), "{picture}");
    assert!(
        stage
            .lab
            .dir()
            .join("here/thief.pcapng")
            .metadata()
            .unwrap()
            .len()
            > 1_000_000
    );
}

/// The blocks for the host, before and after those for the guest.
fn around(page: &str) -> [String; 2] {
    let mut parts = [String::new(), String::new()];
    let mut after = 0;
    for (info, text) in typed::fenced(page) {
        match info {
            "sh host" => parts[after].push_str(&text),
            "sh guest" | "sh guest suricata" => after = 1,
            _ => {}
        }
    }
    parts
}

/// A guest with the static program, the drop-in and tcpdump where the packages put them.
fn sensor(lab: &Lab, memory_mib: u32, more: impl FnOnce(Image) -> Image) -> Guest {
    let dropin = program("libvnplug_pcap.so").unwrap();
    let image = image()
        .unwrap()
        .program("/usr/bin/tcpdump")
        .program_at(dropin, "/usr/lib/vnplug/libpcap.so.0.8");
    let config = QemuConfig {
        image: more(image),
        memory_mib,
        ..QemuConfig::default()
    };
    Qemu::boot(lab, config).unwrap_or_else(|error| panic!("{error}"))
}

/// tcpdump becomes another user, whom the guest does not have.
const USERS: &str =
    "echo tcpdump:x:100:100::/:/bin/sh >>/etc/passwd; echo tcpdump:x:100: >>/etc/group\n";

#[test]
fn a_virtual_machine_becomes_a_sensor() {
    let stage = Stage::new();
    let page = typed::page("docs/tutorials/suricata.md");
    let guest = sensor(&stage.lab, 256, |image| image);
    let [before, after] = around(&page).map(|it| at_its_monitor(&it, &guest));
    let (output, said) = stage.run(&before);
    assert!(output.status.success(), "{said}");
    assert!(
        said.contains("0 lost") && said.contains("host:lab"),
        "{said}"
    );

    let inside = format!("set -e\n{USERS}{}", script(&page, "sh guest"));
    let output = guest
        .run(&format!("{{ {inside} }} 2>&1"), PATIENCE)
        .unwrap();
    let text = output.text();
    assert_eq!(output.status, 0, "{text}");
    assert_eq!(text.matches("IP 10.0.0.").count(), 5, "{text}");
    assert!(text.contains("ok") && text.contains("traffic"), "{text}");

    let (output, said) = stage.run(&after);
    assert!(output.status.success(), "{said}");
    let missing = guest.run("vnplug list 2>&1", PATIENCE).unwrap();
    assert!(!missing.text().contains("host:lab"), "{}", missing.text());
    first_screen(&stage, &guest);
}

/// README's first commands, with the same machines. libvirt hands the same on to QEMU's monitor
/// (`cli/tests/libvirt.rs`).
fn first_screen(stage: &Stage, guest: &Guest) {
    let readme = typed::page("README.md");
    let of = |who: &str| -> String {
        let lines = readme.lines().filter_map(|line| line.strip_prefix(who));
        let commands = lines.map(|line| line.split(" #").next().unwrap().trim_end());
        commands.map(|command| format!("{command}\n")).collect()
    };
    stage.netns.veth("eth1", "mirror").unwrap();
    let monitor = guest.qmp_path().unwrap();
    let monitor = format!("--qmp {}", monitor.display());
    let host = of("    host$  sudo ").replace("--libvirt sensor", &monitor);
    let (output, said) = stage.run(&host);
    assert!(
        host.lines().count() == 2 && output.status.success(),
        "{said}"
    );
    let stream = Stream {
        pps: NonZeroU64::new(200),
        ..Stream::new("mirror", 12_000)
    };
    let _sending = stream.start(&stage.netns).unwrap();
    let sees = || guest.run("vnplug list 2>&1", PATIENCE).unwrap().text();
    until("the guest sees the wire", sees, |text| {
        text.contains("host:eth1")
    });
    let command = format!("{} -c 5 2>&1", of("    guest$ sudo ").trim());
    let text = guest.run(&command, PATIENCE).unwrap().text();
    assert_eq!(text.matches("IP 10.0.0.").count(), 5, "{text}");
}

/// The same with Suricata, which takes a minute under emulation and is not installed by `setup.sh`.
#[test]
fn suricata_alerts_in_a_virtual_machine() {
    let suricata = Path::new("/usr/bin/suricata");
    if std::env::var_os("VNPLUG_LONG").is_none() || !suricata.exists() {
        eprintln!("skipped: it needs VNPLUG_LONG=1 and /usr/bin/suricata (bookworm-backports)");
        return;
    }
    let stage = Stage::new();
    let page = typed::page("docs/tutorials/suricata.md");
    let guest = sensor(&stage.lab, 1536, |mut image| {
        // It names files by their contents.
        let magic = "/usr/lib/file/magic.mgc";
        image = image
            .program(suricata)
            .file(magic, "/usr/share/misc/magic.mgc", 0o644);
        let files = [
            "suricata.yaml",
            "classification.config",
            "reference.config",
            "threshold.config",
        ];
        for name in files {
            let path = Path::new("/etc/suricata").join(name);
            image = image.file(&path, &path, 0o644);
        }
        image
    });
    let [before, _] = around(&page).map(|it| at_its_monitor(&it, &guest));
    let (output, said) = stage.run(&before);
    assert!(output.status.success(), "{said}");
    let steps = script(&page, "sh guest") + &script(&page, "sh guest suricata");
    let inside = format!("set -e\n{USERS}{steps}");
    let limit = PATIENCE + Duration::from_secs(200);
    let output = guest.run(&format!("{{ {inside} }} 2>&1"), limit).unwrap();
    let text = output.text();
    assert_eq!(output.status, 0, "{text}");
    assert!(text.contains("a datagram"), "{text}");
}

/// What `make install` installs for who writes a back-end, in a `/usr/local` that nobody else sees; and a `/tmp` of the same kind.
fn installed() -> String {
    let vnplug = program("vnplug").unwrap();
    let vnplugd = program("vnplugd").unwrap();
    let library = library_dir().unwrap().join("libvnplug.so");
    let header = Path::new(env!("CARGO_MANIFEST_DIR")).join("../guest/include/vnplug.h");
    format!(
        "mount -t tmpfs none /usr/local
mkdir /usr/local/bin /usr/local/lib /usr/local/include
cp {} {} /usr/local/bin
cp {} /usr/local/lib
cp {} /usr/local/include
mount -t tmpfs none /tmp
mkdir /tmp/here
chown 1000 /tmp/here
cd /tmp/here
export PATH=/usr/local/bin:$PATH LD_LIBRARY_PATH=/usr/local/lib
",
        vnplug.display(),
        vnplugd.display(),
        library.display(),
        header.display()
    )
}

#[test]
fn a_clock_for_guests_is_written_spoken_to_and_broken() {
    let page = typed::page("docs/backends.md");
    let (_, tutorial) = page.split_once("\n## Tutorial: ").unwrap();
    let tutorial = tutorial.split("\n## ").next().unwrap();
    let (script, shown) = typed::by_two(tutorial);
    let output = typed::run_apart(&(installed() + &script), &[]);
    let told = String::from_utf8_lossy(&output.stdout).into_owned();
    let said = format!("{told}\n{}", String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{said}");
    let printed: Vec<&str> = told.split(typed::STEP).collect();
    assert_eq!((printed.len(), shown.len()), (7, 6), "{said}");
    for (shown, printed) in shown.iter().zip(&printed) {
        let missing = typed::missing(shown, printed);
        assert_eq!(missing, None, "of\n{shown}\nin\n{printed}\nof\n{said}");
    }
}

/// The lab's QEMU has its monitor elsewhere.
fn at_its_monitor(script: &str, guest: &Guest) -> String {
    let monitor = guest.qmp_path().unwrap();
    script.replace("/run/sensor.qmp", &monitor.display().to_string())
}
