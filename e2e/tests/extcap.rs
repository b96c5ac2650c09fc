//! tshark captures through `vnplug extcap`, from devices and from recordings, as Wireshark does.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs;
use std::os::unix::fs::{PermissionsExt, chown, symlink};
use std::path::PathBuf;
use std::process::{Command, Output};

use vnplug_e2e::Lab;
use vnplug_e2e::daemon::{Daemon, program};

/// Wireshark looks into a directory of the user's only if the user is not root.
const NOBODY: u32 = 65_534;

struct Wireshark {
    dir: PathBuf,
    extcap: PathBuf,
    socket: PathBuf,
}

impl Wireshark {
    fn new(lab: &Lab, daemon: &Daemon) -> Self {
        let shared = |path: &std::path::Path| {
            fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
        };
        let extcap = lab.dir().join("extcap");
        fs::create_dir(&extcap).unwrap();
        // A copy: others may not be allowed to look into the build's directory.
        let copy = lab.dir().join("vnplug");
        fs::copy(program("vnplug").unwrap(), &copy).unwrap();
        symlink(&copy, extcap.join("vnplug-extcap")).unwrap();
        let dir = lab.dir().join("home");
        fs::create_dir(&dir).unwrap();
        chown(&dir, Some(NOBODY), Some(NOBODY)).unwrap();
        let socket = daemon.socket();
        for path in [lab.dir(), &extcap, &copy, socket.parent().unwrap()] {
            shared(path);
        }
        fs::set_permissions(&socket, fs::Permissions::from_mode(0o666)).unwrap();
        Self {
            dir,
            extcap,
            socket,
        }
    }

    fn tshark(&self, args: &[&str]) -> Output {
        Command::new("setpriv")
            .args(["--reuid", "65534", "--regid", "65534", "--clear-groups"])
            .args(["timeout", "180", "tshark"])
            .args(args)
            .env("HOME", &self.dir)
            .env("VNPLUG_SOCKET", &self.socket)
            .env("WIRESHARK_EXTCAP_DIR", &self.extcap)
            .current_dir(&self.dir)
            .output()
            .unwrap()
    }
}

fn words(output: &Output) -> String {
    let both = [&output.stdout[..], &output.stderr[..]].concat();
    String::from_utf8_lossy(&both).into_owned()
}

#[test]
fn tshark_captures_from_a_device() {
    let lab = Lab::new().unwrap();
    let grant = format!("uid:{NOBODY}=lab");
    let source = "lab=gen,pps=1000,size=100";
    let daemon = Daemon::start(&lab, None, &["--source", source, "--allow", &grant]).unwrap();
    let wireshark = Wireshark::new(&lab, &daemon);
    let text = words(&wireshark.tshark(&["-D"]));
    assert!(text.contains("vnplug-host:lab (vNPlug host:lab"), "{text}");
    let text = words(&wireshark.tshark(&["-i", "vnplug-host:lab", "-L"]));
    assert!(text.contains("EN10MB (Ethernet)"), "{text}");

    let fields = ["-T", "fields", "-e", "frame.len", "-e", "frame.cap_len"];
    let lens = |args: &[&str]| {
        let args = [&["-i", "vnplug-host:lab"], args, &fields].concat();
        let output = wireshark.tshark(&args);
        assert!(output.status.success(), "{}", words(&output));
        let text = String::from_utf8(output.stdout).unwrap();
        text.lines().map(str::to_owned).collect::<Vec<_>>()
    };
    assert_eq!(lens(&["-c", "50"]), vec!["100\t100"; 50]);
    assert_eq!(lens(&["-f", "udp", "-c", "5"]), vec!["100\t100"; 5]);
    assert!(lens(&["-f", "tcp", "-a", "duration:2"]).is_empty());
    // A filter that is none says so.
    let output = wireshark.tshark(&["-i", "vnplug-host:lab", "-f", "udp prt", "-c", "1"]);
    assert!(!output.status.success(), "{}", words(&output));
}

#[test]
fn tshark_opens_a_range_of_a_recording() {
    let lab = Lab::new().unwrap();
    let source = "lab=gen,pps=1000,size=100";
    let daemon = Daemon::start(&lab, None, &["--source", source]).unwrap();
    let wireshark = Wireshark::new(&lab, &daemon);
    let recording = lab.dir().join("rec");
    let to = recording.to_str().unwrap();
    let (code, said) = daemon.vnplug(&["record", "lab", "-t", "2s", "--to", to]);
    assert_eq!(code, Some(0), "{said}");
    for entry in fs::read_dir(&recording).unwrap() {
        let path = entry.unwrap().path();
        fs::set_permissions(path, fs::Permissions::from_mode(0o644)).unwrap();
    }
    fs::set_permissions(&recording, fs::Permissions::from_mode(0o755)).unwrap();
    let option = format!("extcap.vnplug_recording.recording:{}", recording.display());
    let count = |more: &[&str]| {
        let base = ["-i", "vnplug_recording", "-o", &option];
        let fields = ["-T", "fields", "-e", "frame.len"];
        let output = wireshark.tshark(&[&base[..], more, &fields].concat());
        assert!(output.status.success(), "{}", words(&output));
        String::from_utf8(output.stdout).unwrap().lines().count()
    };
    let all = count(&[]);
    assert!(all > 100, "{all}");
    assert_eq!(count(&["-f", "udp"]), all);
    assert_eq!(count(&["-f", "tcp"]), 0);
    assert_eq!(
        count(&["-o", "extcap.vnplug_recording.to:2020-01-01T00:00"]),
        0
    );
}
