//! The lab under QEMU: both boards, files, hot-plug over QMP, a tap.

use std::fs;
use std::io::{Read, Write};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixListener;
use std::time::Instant;

use serde_json::json;
use vnplug_e2e::{Guest, Image, Lab, Machine, Netns, Qemu, QemuConfig};
use vnplug_testing::PATIENCE;

fn boot(lab: &Lab, config: QemuConfig) -> Guest {
    Qemu::boot(lab, config).unwrap_or_else(|error| panic!("{error}"))
}

/// Plugs a shared-memory device and a named serial port into a running guest and uses both.
#[expect(clippy::unwrap_used, reason = "a helper of tests")]
fn hot_plug(machine: Machine, buses: [&str; 2]) {
    let lab = Lab::new().unwrap();
    let guest = boot(
        &lab,
        QemuConfig {
            machine,
            ..QemuConfig::default()
        },
    );
    let path = lab.dir().join("pool");
    let pool = fs::File::options()
        .read(true)
        .write(true)
        .create_new(true)
        .open(&path)
        .unwrap();
    pool.set_len(1 << 20).unwrap();
    pool.write_all_at(b"from the host", 4096).unwrap();
    let socket = lab.dir().join("agent");
    let listener = UnixListener::bind(&socket).unwrap();

    let mut qmp = guest.qmp().unwrap();
    let mut execute = |command: &str, arguments| qmp.execute(command, arguments).unwrap();
    execute(
        "object-add",
        json!({ "qom-type": "memory-backend-file", "id": "pool", "mem-path": path, "size": 1 << 20, "share": true }),
    );
    execute(
        "device_add",
        json!({ "driver": "ivshmem-plain", "id": "plain", "memdev": "pool", "bus": buses[0] }),
    );
    let address = json!({ "type": "unix", "data": { "path": socket } });
    let backend =
        json!({ "type": "socket", "data": { "addr": address, "server": false, "reconnect": 1 } });
    execute("chardev-add", json!({ "id": "agent", "backend": backend }));
    execute(
        "device_add",
        json!({ "driver": "virtio-serial-pci", "id": "serial", "bus": buses[1] }),
    );
    execute(
        "device_add",
        json!({ "driver": "virtserialport", "bus": "serial.0", "chardev": "agent", "name": "test.agent" }),
    );

    // The guest finds a device 1af4:1110 and maps its memory, BAR 2.
    let find =
        "cd /sys/bus/pci/devices; until grep -l 0x1110 */device; do sleep 0.1; done | cut -d/ -f1";
    let device = guest.run(find, PATIENCE).unwrap().text();
    let look = format!(
        "cd /sys/bus/pci/devices/{device} && cat vendor && echo 1 >enable && stat -c %s resource2"
    );
    assert_eq!(
        guest.run(&look, PATIENCE).unwrap().text(),
        "0x1af4\n1048576"
    );

    // The port appears under its name and carries bytes both ways.
    let (mut agent, _) = listener.accept().unwrap();
    agent.set_read_timeout(Some(PATIENCE)).unwrap();
    let port = guest
        .run("until vport test.agent; do sleep 0.1; done", PATIENCE)
        .unwrap()
        .text();
    assert!(port.starts_with("/dev/vport"), "{port}");
    let echo = guest
        .spawn(&format!(
            "exec 4<>{port}; read -r line <&4; echo \"guest read $line\" >&4"
        ))
        .unwrap();
    agent.write_all(b"hello\n").unwrap();
    let mut reply = [0; 16];
    agent.read_exact(&mut reply).unwrap();
    assert_eq!(&reply, b"guest read hello");
    assert!(echo.wait(PATIENCE).unwrap().success());
}

#[test]
fn a_pc_takes_shared_memory_and_a_port_while_it_runs() {
    hot_plug(Machine::Pc, ["pci.0", "pci.0"]);
}

#[test]
fn a_q35_takes_them_in_its_root_ports() {
    hot_plug(Machine::Q35 { root_ports: 2 }, ["port0", "port1"]);
}

#[test]
fn large_files_cross_both_ways() {
    let lab = Lab::new().unwrap();
    let guest = boot(
        &lab,
        QemuConfig {
            image: Image::default().program("/usr/bin/tcpdump"),
            ..QemuConfig::default()
        },
    );
    assert!(guest.run("tcpdump --version", PATIENCE).unwrap().success());
    let content: Vec<u8> = (0..20_000_000u32)
        .map(|n| (n.wrapping_mul(2_654_435_761) >> 24) as u8)
        .collect();
    let (out, back) = (lab.dir().join("out"), lab.dir().join("back"));
    fs::write(&out, &content).unwrap();
    let start = Instant::now();
    guest.push(&out, "/tmp/big", PATIENCE).unwrap();
    let pushed = start.elapsed();
    guest.pull("/tmp/big", &back, PATIENCE).unwrap();
    eprintln!(
        "20 MB pushed in {pushed:?}, pulled in {:?}",
        start.elapsed() - pushed
    );
    assert!(
        fs::read(&back).unwrap() == content,
        "20 MB differ after a round trip"
    );
    assert!(guest.pull("/nonexistent", &back, PATIENCE).is_err());
    // A file that cannot be read does not put the port out of step.
    guest.pull("/lab/settings", &back, PATIENCE).unwrap();
    assert_eq!(fs::read_to_string(&back).unwrap(), "LAB_PORT=lab.cmd\n");
}

#[test]
fn an_iommu_lets_the_guest_have_vfio() {
    let lab = Lab::new().unwrap();
    let config = QemuConfig {
        machine: Machine::Q35 { root_ports: 1 },
        iommu: true,
        ..QemuConfig::default()
    };
    let guest = boot(&lab, config);
    let look = guest
        .run(
            "ls -d /dev/vfio/vfio /sys/bus/pci/drivers/vfio-pci /sys/kernel/iommu_groups/0",
            PATIENCE,
        )
        .unwrap();
    assert!(look.success(), "{}", look.text());
}

#[test]
fn a_frame_sent_into_the_tap_reaches_the_guest() {
    let lab = Lab::new().unwrap();
    let netns = Netns::new().unwrap();
    netns.tap("tap0").unwrap();
    netns.veth("wire0", "wire1").unwrap();
    netns.bridge("br0", &["tap0", "wire1"]).unwrap();
    let config = QemuConfig {
        taps: vec!["tap0".to_owned()],
        netns: Some(netns.name().to_owned()),
        ..QemuConfig::default()
    };
    let guest = boot(&lab, config);
    guest
        .run("ip link set eth0 promisc on up", PATIENCE)
        .unwrap();
    netns
        .enter(|| vnplug_e2e::traffic::Stream::new("wire0", 5).send())
        .unwrap()
        .unwrap();
    let count = "until [ $(cat /sys/class/net/eth0/statistics/rx_packets) -ge 5 ]; do sleep 0.1; done; \
                 cat /sys/class/net/eth0/statistics/rx_packets";
    assert_eq!(guest.run(count, PATIENCE).unwrap().text(), "5");
}
