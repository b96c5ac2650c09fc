//! Flows as others read them: tshark, and a collector.

use std::fs;
use std::net::UdpSocket;
use std::path::Path;
use std::time::Duration;

use vnplug_frame::witness::{Protocol, Shape, make};
use vnplug_testing::until;

use super::{Recording, write};

/// tshark reads the file, and what a collector is sent, as the flows are told in JSON.
#[test]
fn flows_are_ipfix_to_others() {
    let it = Recording::new();
    let capture = it.scratch.path("flows.pcapng");
    let frames = (0..3000_u64).map(|n| {
        let shape = Shape {
            len_bytes: 110 + (n % 7) as usize,
            flow: (n % 40) as u32,
            protocol: [Protocol::Udp4, Protocol::Tcp6, Protocol::Icmp4][(n % 3) as usize],
            vlan_tci: None,
        };
        (n * 1_000_000, make(shape, 1, n).unwrap())
    });
    write(&capture, frames);
    let flows = |more: &[&str]| {
        let more = more.iter().map(Path::new);
        let words: Vec<&Path> = [Path::new("flows"), &capture]
            .into_iter()
            .chain(more)
            .collect();
        it.vnplug(&words)
    };
    let (code, out, _) = flows(&["--json", "--top", "10000"]);
    assert_eq!(code, 0);
    let rows = out
        .lines()
        .map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
    let mut wanted: Vec<String> = rows
        .map(|row| {
            let text = |key: &str| row[key].to_string().replace('"', "");
            let keys = [
                "protocol",
                "from",
                "to",
                "from_port",
                "to_port",
                "packets",
                "bytes",
                "ip_bytes",
            ];
            let mut words = keys.map(text);
            if let Some(kind) = row["icmp_type"].as_u64() {
                let code = row["icmp_code"].as_u64().unwrap();
                assert_eq!((&words[3][..], &words[4][..]), ("0", "0"));
                words[4] = (kind << 8 | code).to_string();
            }
            words.join(" ")
        })
        .collect();
    wanted.sort();
    assert!(wanted.len() >= 100, "{}", wanted.len());

    let file = it.scratch.path("flows.ipfix");
    let (code, _, err) = flows(&["--ipfix", file.to_str().unwrap()]);
    assert_eq!(code, 0, "{err}");
    assert_eq!(records(&tshark(&file)), wanted);
    // No file is written over.
    let (code, _, err) = flows(&["--ipfix", file.to_str().unwrap()]);
    assert!(code != 0 && err.contains("flows.ipfix"), "{err}");

    let collector = UdpSocket::bind("127.0.0.1:0").unwrap();
    collector
        .set_read_timeout(Some(Duration::from_millis(500)))
        .unwrap();
    let to = format!("udp://{}", collector.local_addr().unwrap());
    let (code, _, err) = flows(&["--ipfix", &to]);
    assert_eq!(code, 0, "{err}");
    let (mut bytes, mut came) = ([0; 2048], Vec::new());
    while let Ok(len) = collector.recv(&mut bytes) {
        assert!(len <= 1472, "{len} does not fit a frame");
        came.extend_from_slice(&bytes[..len]);
    }
    let sent = it.scratch.path("sent.ipfix");
    fs::write(&sent, came).unwrap();
    assert_eq!(records(&tshark(&sent)), wanted);

    if std::env::var_os("VNPLUG_LONG").is_some() {
        let told = nfdump(&it.scratch.path("collected"), |to| {
            assert_eq!(flows(&["--ipfix", to]).0, 0);
        });
        let counts = wanted.iter().map(|row| {
            let words: Vec<&str> = row.split(' ').collect();
            format!("{} {}", words[5], words[7])
        });
        let mut counts: Vec<String> = counts.collect();
        counts.sort();
        assert_eq!(told, counts);
    }
}

/// A program that ends with the test.
struct Collector(std::process::Child);

impl Drop for Collector {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// What Debian's nfdump tells of flows that `export` sends to its collector: packets and bytes of IP of each.
fn nfdump(directory: &Path, export: impl Fn(&str)) -> Vec<String> {
    fs::create_dir(directory).unwrap();
    let free = UdpSocket::bind("127.0.0.1:0").unwrap();
    let address = free.local_addr().unwrap();
    drop(free);
    let port = address.port();
    let mut collector = Collector(
        std::process::Command::new("nfcapd")
            .args(["-b", "127.0.0.1", "-p", &port.to_string(), "-w"])
            .arg(directory)
            .spawn()
            .expect("nfcapd, which ./setup.sh installs"),
    );
    // It says nothing when it listens, or has read what was sent: its socket does.
    let waiting = || {
        let sockets = fs::read_to_string("/proc/net/udp").unwrap();
        let own = format!(" 0100007F:{port:04X} ");
        let line = sockets.lines().find(|line| line.contains(&own))?;
        let queues = line.split_whitespace().nth(4)?;
        u32::from_str_radix(queues.split(':').nth(1)?, 16).ok()
    };
    until("nfcapd listens", waiting, Option::is_some);
    export(&format!("udp://{address}"));
    until("nfcapd reads", waiting, |bytes| *bytes == Some(0));
    let pid = rustix::process::Pid::from_child(&collector.0);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    assert!(collector.0.wait().unwrap().success());
    let output = std::process::Command::new("nfdump")
        .args(["-q", "-o", "fmt:%pkt|%byt", "-R"])
        .arg(directory)
        .output()
        .unwrap();
    let text = String::from_utf8(output.stdout).unwrap().replace(' ', "");
    let mut told: Vec<String> = text.lines().map(|line| line.replace('|', " ")).collect();
    told.sort();
    told
}

fn tshark(file: &Path) -> String {
    let mut command = std::process::Command::new("tshark");
    command
        .arg("-r")
        .arg(file)
        .args(["-T", "json", "--no-duplicate-keys"]);
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    String::from_utf8(output.stdout).unwrap()
}

/// The records that tshark found, as the test has them.
fn records(text: &str) -> Vec<String> {
    fn find(value: &serde_json::Value, found: &mut Vec<String>) {
        if let Some(object) = value.as_object() {
            let field = |name: &str| object.get(name).and_then(|it| it.as_str());
            let first = |names: &[&str]| {
                names
                    .iter()
                    .find_map(|name| field(name))
                    .unwrap_or("")
                    .to_owned()
            };
            if object.contains_key("cflow.srcport") {
                found.push(
                    [
                        first(&["cflow.protocol"]),
                        first(&["cflow.srcaddr", "cflow.srcaddrv6"]),
                        first(&["cflow.dstaddr", "cflow.dstaddrv6"]),
                        first(&["cflow.srcport"]),
                        first(&["cflow.dstport"]),
                        first(&["cflow.packets"]),
                        first(&["cflow.layer2_octet_delta_count"]),
                        first(&["cflow.octets"]),
                    ]
                    .join(" "),
                );
            }
            object.values().for_each(|it| find(it, found));
        } else if let Some(list) = value.as_array() {
            list.iter().for_each(|it| find(it, found));
        }
    }
    let mut found = Vec::new();
    find(&serde_json::from_str(text).unwrap(), &mut found);
    found.sort();
    found
}
