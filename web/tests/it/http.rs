//! The server as a client sees it: numbers, refusals, downloads, limits.

use std::fs;
use std::io::BufReader;
use std::os::unix::fs::PermissionsExt;
use std::process::{Command, Stdio};

use serde_json::json;
use vnplug_testing::eventually;

use crate::support::*;

/// 100 packets a second for ten seconds, then nothing for a minute, then one more.
pub(crate) fn recording(place: &TestDir) {
    let frames = [udp(53, 100), udp(443, 1000)];
    let packets = (0..1000_u64).map(|n| (START + n * SECOND / 100, &frames[n as usize % 2][..]));
    segment(&place.0, 0, packets);
    segment(&place.0, 1, [(START + 70 * SECOND, &frames[0][..])]);
}

#[test]
fn the_timeline_has_every_packet_in_its_place() {
    let place = TestDir::new("web");
    recording(&place);
    let server = Server::start(&[&place.0]);
    let all = server.timeline("bins=71");
    assert_eq!(
        all["total"],
        json!({ "packets": 1001, "bytes": 550_100, "lost": 0 })
    );
    assert_eq!(all["from_ns"], START.to_string());
    assert_eq!(all["all"]["to_ns"], (START + 70 * SECOND + 1).to_string());
    assert_eq!(all["spread_ns"], "0");
    let gap = [START + 10 * SECOND - SECOND / 100, START + 70 * SECOND];
    assert_eq!(all["gaps"], json!([gap.map(|ns| ns.to_string())]));
    assert_eq!(all["segments"].as_array().unwrap().len(), 2);
    // Seconds as people write them; the end does not belong to the range.
    let two = server.timeline("from=2026-11-21T13:45:02&to=2026-11-21T13:45:04Z&bins=4");
    assert_eq!(two["packets"], json!([50, 50, 50, 50]));
    assert_eq!(two["bytes"], json!([27_500, 27_500, 27_500, 27_500]));
    assert_eq!(two["bin_ns"], (SECOND / 2).to_string());
    let none = server.timeline("from=2026-11-21T13:45:30&to=2026-11-21T13:45:40");
    assert_eq!(none["total"]["packets"], 0);
}

#[test]
fn a_gap_within_a_chunk_is_one() {
    let place = TestDir::new("web");
    let frame = udp(53, 100);
    // Ten packets a second, and 2.2 seconds without: all in one chunk.
    let at = |n: u64| START + n * SECOND / 10 + n / 50 * 21 * SECOND / 10;
    segment(&place.0, 0, (0..100).map(|n| (at(n), &frame[..])));
    let server = Server::start(&[&place.0]);
    for bins in [600, 100, 20, 6] {
        let all = server.timeline(&format!("bins={bins}"));
        let gap = [at(49), at(50)].map(|ns| ns.to_string());
        assert_eq!(all["gaps"], json!([gap]), "{bins}");
    }
    // A bar is longer.
    assert_eq!(server.timeline("bins=5")["gaps"], json!([]));
    // Of what is shown, also where nothing came.
    let [from, to] = [1, 2].map(|s| at(49) / SECOND + s);
    let part = server.timeline(&format!("from={from}&to={to}"));
    let gap = [from, to].map(|s| (s * SECOND).to_string());
    assert_eq!(part["gaps"], json!([gap]));
}

#[test]
fn without_an_index_it_is_the_same() {
    let place = TestDir::new("web");
    recording(&place);
    let with = Server::start(&[&place.0]).timeline("bins=71");
    for entry in fs::read_dir(&place.0).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|ext| ext == "vnx") {
            fs::remove_file(path).unwrap();
        }
    }
    let without = Server::start(&[&place.0]).timeline("bins=71");
    assert_eq!(with, without);
}

#[test]
fn nothing_and_one_packet_are_timelines_too() {
    let place = TestDir::new("web");
    let server = Server::start(&[&place.0]);
    let empty = server.timeline("");
    assert_eq!((&empty["all"], &empty["files"]), (&json!(null), &json!(0)));
    assert_eq!(empty["total"]["packets"], 0);
    segment(&place.0, 0, []);
    eventually("the file is seen", || server.timeline("")["files"] == 1);
    assert_eq!(server.timeline("")["all"], json!(null));
    segment(&place.0, 1, [(START, &udp(1, 60)[..])]);
    eventually("the packet is seen", || {
        server.timeline("")["total"]["packets"] == 1
    });
    let one = server.timeline("");
    // In a second, so that there is a rate.
    assert_eq!(one["to_ns"], (START + SECOND).to_string());
    assert_eq!(
        (&one["packets"][0], &one["total"]["packets"]),
        (&json!(1), &json!(1))
    );
}

#[test]
fn a_recording_grows_while_it_is_looked_at() {
    let place = TestDir::new("web");
    let server = Server::start(&[&place.0]);
    let mut recorder = recorder(&place.0);
    let frame = udp(9, 1400);
    let mut taken = 0;
    // The last steps are beyond a block of the index.
    for packets in [1, 10, 100, 20_000, 15_000] {
        for _ in 0..packets {
            let lost = u32::from(taken == 50) * 7;
            take(&mut recorder, START + taken * SECOND / 1000, &frame, lost);
            taken += 1;
        }
        recorder.flush();
        eventually("the packets are in the timeline", || {
            server.timeline("")["total"]["packets"] == taken
        });
        eventually("the mark is there", || {
            let state = &server.timeline("")["recordings"][0];
            state["mark_packets"] == taken
        });
    }
    let last = START + (taken - 1) * SECOND / 1000;
    let all = server.timeline("");
    // Nothing waits any more: the mark is behind the last packet.
    assert_eq!(all["recordings"][0]["mark_ns"], (last + 1).to_string());
    assert_eq!(
        all["total"],
        json!({ "packets": taken, "bytes": taken * 1400, "lost": 7 })
    );
    recorder.finish();
    eventually("it stays when the recorder ends", || {
        server.timeline("")["total"]["packets"] == taken
    });
    assert_eq!(
        Server::start(&[&place.0]).timeline("")["total"],
        all["total"]
    );
}

#[test]
fn filters_are_checked_by_libpcap() {
    let place = TestDir::new("web");
    recording(&place);
    let server = Server::start(&[&place.0]);
    let check = |filter: &str| server.json(&format!("/api/check?filter={}", encoded(filter)));
    assert_eq!(
        check("host 10.1.2.3 and udp port 443"),
        json!({ "ok": true })
    );
    assert_eq!(check(""), json!({ "ok": true }));
    let wrong = check("host and or");
    assert_eq!(wrong["ok"], false);
    let words = wrong["error"].as_str().unwrap();
    assert!(
        words.contains("syntax error") && words.contains("for example"),
        "{words}"
    );
    let count = |filter: &str| server.json(&format!("/api/count?filter={}", encoded(filter)));
    assert_eq!(count("udp port 443")["packets"], 500);
    assert_eq!(count("udp port 443")["complete"], true);
    assert_eq!(count("")["packets"], 1001);
}

#[test]
fn a_download_is_what_extract_writes() {
    let place = TestDir::new("web");
    recording(&place);
    let server = Server::start(&[&place.0]);
    let (from, to) = (START + SECOND, START + 3 * SECOND);
    let filter = "udp port 443";
    let range = "from=1795268701&to=1795268703.0";
    let asked = format!("/api/extract?{range}&filter={}", encoded(filter));
    let answer = server.get(&asked);
    assert_eq!(answer.status, 200, "{}", answer.text());
    assert_eq!(answer.body, extracted(&[&place.0], from, to, filter));
    assert_eq!(
        answer.header("content-disposition"),
        "attachment; filename=\"vnplug-20261121T134501.pcapng\""
    );
    let file = place.0.join("found");
    fs::write(&file, &answer.body).unwrap();
    assert_eq!(by_tcpdump(&file, filter), 100);
    let pcap = server.get(&format!("{asked}&format=pcap"));
    assert_eq!(pcap.body[..4], 0xa1b2_3c4d_u32.to_le_bytes());
    fs::write(&file, &pcap.body).unwrap();
    assert_eq!(by_tcpdump(&file, ""), 100);
    // Nothing found is a file without packets.
    let empty = server.get("/api/extract?filter=arp");
    fs::write(&file, &empty.body).unwrap();
    assert_eq!(by_tcpdump(&file, ""), 0);
}

#[test]
fn what_makes_no_sense_is_refused_with_a_reason() {
    let place = TestDir::new("web");
    recording(&place);
    let server = Server::start(&[&place.0]);
    let long = "a".repeat(2001);
    for (path, reason) in [
        ("/api/timeline?from=yesterday", "is no time: write"),
        ("/api/timeline?from=2&to=1", "from is not before to"),
        ("/api/timeline?bins=0", "1 to 4000"),
        ("/api/timeline?bins=4001", "1 to 4000"),
        ("/api/timeline?bin=7", "there are: from, to, bins"),
        ("/api/timeline?from=1&from=2", "twice"),
        ("/api/extract?format=zip", "pcapng or pcap"),
        ("/api/extract?filter=port+port", "syntax error"),
        ("/api/count?filter=port+port", "syntax error"),
        (&format!("/api/check?filter={long}"), "vnplug extract"),
        (&format!("/api/extract?filter={long}"), "vnplug extract"),
        ("/api/recordings?x=1", "no parameter"),
    ] {
        let answer = server.get(path);
        assert_eq!(answer.status, 400, "{path}");
        let error = answer.json()["error"].as_str().unwrap().to_owned();
        assert!(error.contains(reason), "{path}: {error}");
    }
    for path in ["/api/", "/nothing", "/..%2f..%2fetc%2fpasswd", "/a/b"] {
        assert_eq!(server.get(path).status, 404, "{path}");
    }
    let host = server.address.to_string();
    assert_eq!(
        server
            .ask("POST", "/api/extract", &[("Host", &host)])
            .status,
        405
    );
}

#[test]
fn pages_of_other_sites_get_nothing() {
    let place = TestDir::new("web");
    recording(&place);
    let server = Server::start(&[&place.0]);
    for host in ["evil.example", "127.0.0.1.evil.example:80", "10.0.0.1", ""] {
        for path in ["/", "/api/timeline", "/api/extract"] {
            let answer = server.ask("GET", path, &[("Host", host)]);
            assert!(
                [400, 403].contains(&answer.status),
                "{host}: {}",
                answer.status
            );
            assert!(answer.body.len() < 200);
        }
    }
    let host = server.address.to_string();
    for (site, api, page) in [
        ("cross-site", 403, 200),
        ("same-site", 403, 200),
        ("same-origin", 200, 200),
        ("none", 200, 200),
    ] {
        let headers = [("Host", &host[..]), ("Sec-Fetch-Site", site)];
        assert_eq!(
            server.ask("GET", "/api/extract", &headers).status,
            api,
            "{site}"
        );
        assert_eq!(server.ask("GET", "/", &headers).status, page, "{site}");
    }
    let page = server.get("/");
    let policy = page.header("content-security-policy");
    assert!(policy.contains("default-src 'none'") && policy.contains("frame-ancestors 'none'"));
    assert!(!policy.contains("unsafe"), "{policy}");
    assert_eq!(page.header("x-content-type-options"), "nosniff");
    assert_eq!(page.header("cross-origin-resource-policy"), "same-origin");
    assert_eq!(page.header("access-control-allow-origin"), "");
}

#[test]
fn downloads_are_few_and_end_with_their_clients() {
    let place = TestDir::new("web");
    let frame = vec![7; 50_000];
    let packets = (0..1500_u64).map(|n| (START + n, &frame[..]));
    segment(&place.0, 0, packets);
    let server = Server::start(&[&place.0]);
    let host = server.address.to_string();
    let downloads = || {
        server.json("/api/recordings")["downloads"]
            .as_u64()
            .unwrap()
    };
    let start = || {
        let stream = begin(
            server.address,
            "GET",
            "/api/extract",
            &[("Host", &host)],
            b"",
        );
        let mut stream = BufReader::new(stream.unwrap());
        let answer = head(&mut stream).unwrap();
        (stream, answer)
    };
    // None of them is read on: 75 MB do not fit into the buffers of a connection.
    let mut open: Vec<_> = (0..4).map(|_| start()).collect();
    assert!(open.iter().all(|(_, answer)| answer.status == 200));
    let fifth = server.get("/api/extract");
    assert_eq!(fifth.status, 503);
    assert!(
        fifth.text().contains("4 downloads are running"),
        "{}",
        fifth.text()
    );
    assert_eq!(downloads(), 4);
    open.pop();
    eventually("the place is free", || downloads() == 3);
    assert_eq!(start().1.status, 200);
    drop(open);
    eventually("all are free", || downloads() == 0);
}

#[test]
fn a_damaged_file_is_told_and_the_others_are_shown() {
    let place = TestDir::new("web");
    recording(&place);
    fs::write(place.0.join("bad.pcapng"), [0xff; 4096]).unwrap();
    fs::write(place.0.join("odd.state"), "{\"recording\": 7}").unwrap();
    let server = Server::start(&[&place.0]);
    let all = server.timeline("");
    assert_eq!(all["total"]["packets"], 1001);
    let problem = all["problems"][0].as_str().unwrap();
    assert!(problem.contains("bad.pcapng"), "{problem}");
}

#[test]
fn other_machines_are_not_served_without_users() {
    let place = TestDir::new("web");
    let run = |arguments: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_vnplug-web"));
        let output = command.arg(&place.0).args(arguments).output().unwrap();
        (
            output.status.code(),
            String::from_utf8(output.stderr).unwrap(),
        )
    };
    let (code, said) = run(&["--listen", "0.0.0.0:0"]);
    assert_eq!(code, Some(1));
    assert!(
        said.contains("--tokens") && said.contains("ssh -L"),
        "{said}"
    );
    let missing = place.0.join("missing");
    let (code, said) = run(&[missing.to_str().unwrap()]);
    assert_eq!(code, Some(1));
    assert!(said.contains("missing: No such file"), "{said}");
}

#[test]
fn a_user_without_rights_can_serve() {
    let place = TestDir::new("web");
    recording(&place);
    fs::set_permissions(&place.0, fs::Permissions::from_mode(0o755)).unwrap();
    // The build directory may be out of reach for others.
    let program = place.0.join("vnplug-web");
    // NB: not by fs::copy: a child of another test would have it open for writing (ETXTBSY).
    let mut copy = Command::new("cp");
    copy.arg(env!("CARGO_BIN_EXE_vnplug-web")).arg(&program);
    assert!(copy.status().unwrap().success());
    let own = Command::new("id")
        .arg("-u")
        .stderr(Stdio::null())
        .output()
        .unwrap();
    let mut command = match own.stdout == b"0\n" {
        true => {
            let mut setpriv = Command::new("setpriv");
            setpriv.args([
                "--reuid=65534",
                "--regid=65534",
                "--clear-groups",
                "--no-new-privs",
            ]);
            setpriv.arg("--").arg(&program);
            setpriv
        }
        false => Command::new(&program),
    };
    command.current_dir("/");
    let server = Server::start_by(command, &[&place.0]);
    assert_eq!(server.timeline("")["total"]["packets"], 1001);
    assert_eq!(
        server.get("/api/extract").body,
        extracted(&[&place.0], 0, u64::MAX, "")
    );
}

/// Prints how long requests take for 20 GiB: `cargo test --release -p vnplug-web -- --ignored --nocapture
/// twenty`. The files are holes but for the packets by which an index is known to fit.
#[test]
#[ignore = "a measurement"]
fn twenty_gigabytes() {
    use std::os::unix::fs::FileExt;
    use std::time::Instant;
    use vnplug::{Meta, Packet};
    use vnplug_frame::capfile::write::{Interface, pcapng};
    use vnplug_store::index::Builder;

    const PER_CHUNK: u64 = 256;
    const CHUNKS: u64 = 4096;
    const FILES: u64 = 20;
    let place = TestDir::new("web");
    let interface = Interface {
        name: "lab".into(),
        link_type: 1,
        snaplen: 0,
        filter: String::new(),
    };
    let header = pcapng::header(&[interface], "");
    let mut random = 1_u32;
    let mut index_bytes = 0;
    for file in 0..FILES {
        let start = START + file * CHUNKS * PER_CHUNK * 10_000;
        let name = format!("rec-{file:010}-{}", vnplug_store::name::time(start));
        let segment = fs::File::create(place.0.join(format!("{name}.pcapng"))).unwrap();
        segment.write_all_at(&header, 0).unwrap();
        let mut builder = Builder::new();
        let mut index = Vec::new();
        builder.definition(0);
        builder.definition(u64::from(u32::from_le_bytes(
            *header[4..].first_chunk().unwrap(),
        )));
        let mut frame = udp(443, 990);
        for n in 0..CHUNKS * PER_CHUNK {
            let at = header.len() as u64 + n * 1024;
            let ts_ns = start + n * 10_000;
            random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            // As a busy mix: few addresses have most packets.
            frame[26..30].copy_from_slice(&(0x0a00_0000 | random >> 22).to_be_bytes());
            frame[36..38].copy_from_slice(&((random >> 8) as u16 % 2000).to_be_bytes());
            builder.packet(at, 1, ts_ns, &frame);
            builder.amount(990, 0);
            // The first and the last of each block; and what is zoomed into below.
            let of_block = n % (64 * PER_CHUNK);
            let zoomed = file == FILES / 2 && n < 110_000;
            if of_block == 0 || of_block == 64 * PER_CHUNK - 1 || zoomed {
                let meta = Meta {
                    ts_ns,
                    wire_len: 990,
                    flow_hash: 0,
                    lost: 0,
                    flags: 0,
                    vlan_tci: 0,
                    source: 0,
                    queue: 0,
                    ..Meta::default()
                };
                let mut block = vec![0; 1024];
                let packet = Packet {
                    meta,
                    bytes: &frame,
                };
                assert_eq!(pcapng::packet(&mut block, 0, 0, &packet), Some(1024));
                segment.write_all_at(&block, at).unwrap();
            }
            index.extend(builder.take());
        }
        let len = header.len() as u64 + CHUNKS * PER_CHUNK * 1024;
        index.extend(builder.finish(len));
        index_bytes += index.len();
        fs::write(place.0.join(format!("{name}.vnx")), index).unwrap();
    }
    let server = Server::start(&[&place.0]);
    let began = Instant::now();
    let mut asked = 0;
    let all = loop {
        let all = server.json("/api/timeline");
        asked += 1;
        if all["pending_bytes"] == 0 {
            break all;
        }
    };
    let seconds = began.elapsed().as_secs_f64();
    let packets = all["total"]["packets"].as_u64().unwrap();
    assert_eq!(packets, FILES * CHUNKS * PER_CHUNK);
    println!("{packets} packets, {index_bytes} bytes of index: {asked} requests, {seconds:.2} s");
    let middle = (START + FILES / 2 * CHUNKS * PER_CHUNK * 10_000).div_ceil(SECOND);
    for range in [
        "bins=600".to_owned(),
        format!("from={middle}&to={}", middle + 1),
    ] {
        let mut times: Vec<_> = (0..20)
            .map(|_| {
                std::thread::sleep(std::time::Duration::from_millis(350));
                let began = Instant::now();
                server.json(&format!("/api/timeline?{range}"));
                began.elapsed().as_secs_f64() * 1e3
            })
            .collect();
        times.sort_by(f64::total_cmp);
        println!(
            "{range}: {:.1} to {:.1} ms, median {:.1}",
            times[0], times[19], times[10]
        );
    }
}
