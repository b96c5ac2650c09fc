//! A program's own wire, without anything that mediates its calls: what the fence holds by itself.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::thread;
use std::time::Duration;

use vnplug::{Next, Port};
use vnplug_e2e::Lab;
use vnplug_e2e::daemon::{Daemon, counted, value};
use vnplug_e2e::station::Station;
use vnplug_e2e::user::{as_user, open_to_all};
use vnplug_sandbox::act::Transport;
use vnplug_sandbox::wire::{Summary, Wire, WirePlan};
use vnplug_testing::{PATIENCE, eventually};

fn wire(daemon: &Daemon, options: &str) -> Wire {
    let plan: WirePlan = format!("lan0,address=10.0.8.9/24,mac=02:00:00:00:08:09{options}")
        .parse()
        .unwrap();
    let mut wire = Wire::new(&plan, &daemon.socket(), &[]).unwrap();
    wire.start().unwrap();
    wire
}

/// Does something as a program on the wire does, whose calls nobody looks at.
fn on<T: Send>(wire: &Wire, does: impl FnOnce() -> T + Send) -> T {
    thread::scope(|scope| {
        let program = scope.spawn(|| {
            wire.enter().unwrap();
            does()
        });
        program.join().unwrap()
    })
}

/// How many frames of the program are at the switch since the last look.
fn frames(at: &mut Port) -> usize {
    // What is on its way arrives.
    thread::sleep(Duration::from_millis(100));
    let mut count = 0;
    while let Next::Packet(_) = at.next().unwrap() {
        count += 1;
    }
    count
}

fn closes(summary: &Summary) {
    let Summary {
        fence,
        taken,
        received,
    } = summary;
    assert_eq!(
        taken.all,
        taken.sent + taken.denied + taken.dropped(),
        "{summary:?}"
    );
    assert_eq!(
        (fence.sent.all, fence.sent.dropped()),
        (taken.all, taken.denied),
        "{summary:?}"
    );
    let sum = received.injected + received.merged + received.denied + received.dropped();
    assert_eq!(received.received, sum, "{summary:?}");
    assert_eq!(
        (fence.received.all, fence.received.dropped()),
        (received.received, received.denied)
    );
}

const SHORT: Duration = Duration::from_millis(400);

fn greet(to: SocketAddr) -> std::io::Result<String> {
    let mut stream = TcpStream::connect_timeout(&to, SHORT)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    let mut text = String::new();
    stream.read_to_string(&mut text)?;
    Ok(text)
}

#[test]
fn a_program_whose_calls_nobody_sees_meets_the_fence_and_no_frame_of_it_is_at_the_switch() {
    let lab = Lab::new().unwrap();
    let daemon = Daemon::start(&lab, None, &["--switch", "lan0"]).unwrap();
    let station = Station::by_nic(&lab, &daemon, "lan0", "10.0.8.2", &[]).unwrap();
    let to: SocketAddr = "10.0.8.2:7000".parse().unwrap();
    let listener = station
        .netns
        .enter(|| TcpListener::bind(to))
        .unwrap()
        .unwrap();
    let server = thread::spawn(move || {
        for stream in listener.incoming().take(2) {
            stream.unwrap().write_all(b"hello").unwrap();
        }
    });
    // The kernel looks for routers and groups of IPv6 by itself.
    let filter = "ether host 02:00:00:00:08:09 and (ip or arp)";
    let mut at_switch = daemon.port("host:lan0").filter(filter).open().unwrap();
    let wire_of = wire(&daemon, "");
    // Neither a frame to it nor a question who has its address.
    let refused = on(&wire_of, || greet(to)).unwrap_err();
    assert!(
        matches!(
            refused.kind(),
            ErrorKind::TimedOut | ErrorKind::HostUnreachable
        ),
        "{refused}"
    );
    on(&wire_of, || {
        let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
        socket.send_to(b"out", to).unwrap();
        socket.set_broadcast(true).unwrap();
        socket.send_to(b"out", "255.255.255.255:7").ok();
    });
    eventually("the fence has seen it", || {
        wire_of.fence().counts().sent.denied > 0
    });
    assert_eq!(frames(&mut at_switch), 0, "{:?}", wire_of.fence());
    // And nobody comes in.
    assert!(!station.pings("10.0.8.9"));
    let in_before = frames(&mut at_switch);
    wire_of.fence().permit(Transport::Tcp, to);
    eventually("the permitted one is reached", || {
        on(&wire_of, || greet(to)).is_ok_and(|text| text == "hello")
    });
    assert!(frames(&mut at_switch) > 0);
    let summary = wire_of.finish();
    closes(&summary);
    assert!(summary.fence.sent.permitted > 0 && summary.fence.sent.denied > 0);
    println!("{summary:?}, {in_before} frames while it was looked for");
    daemon.audit();

    // The same with an open fence: the calls alone would decide, and nobody looks at them.
    let open = wire(&daemon, ",fence=off");
    eventually("the open fence lets it pass", || {
        on(&open, || greet(to)).is_ok_and(|text| text == "hello")
    });
    assert!(frames(&mut at_switch) > 0);
    closes(&open.finish());
    server.join().unwrap();
}

#[test]
fn an_ordinary_user_has_a_wire_and_its_port_is_free_when_it_is_cut() {
    let lab = Lab::new().unwrap();
    let config = open_to_all(&lab, "");
    let join = format!("uid:{}=lan0", vnplug_e2e::user::USER);
    let daemon = Daemon::start(
        &lab,
        None,
        &[
            "--config",
            &config,
            "--switch",
            "lan0",
            "--allow-join",
            &join,
        ],
    )
    .unwrap();
    let ports = || value(counted(&daemon.counters(), "source"), "switch_ports");
    let socket = daemon.socket();
    let wire = as_user(move || {
        let plan: WirePlan = "lan0,address=10.0.8.9/24".parse().unwrap();
        let mut wire = Wire::new(&plan, &socket, &[]).unwrap();
        wire.start().unwrap();
        wire
    });
    eventually("it has joined", || ports() == 1);
    closes(&wire.finish());
    eventually("its port is free", || ports() == 0);
}
