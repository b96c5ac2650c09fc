//! The page in headless Chromium: what it shows is what was recorded, and what it downloads is what
//! `vnplug extract` finds.

use std::fs;

use serde_json::Value;
use vnplug_store::record::{Loss, Status};
use vnplug_testing::eventually;

use crate::browser::Browser;
use crate::support::*;

/// The chart's margins, as in `page/chart.js`.
const LEFT: f64 = 62.0;
const RIGHT: f64 = 14.0;

/// A wave of packets over a minute, a pause of twenty seconds, and a second segment.
fn recording(place: &TestDir) -> u64 {
    let frames = [udp(53, 80), udp(443, 1200)];
    let mut list = Vec::new();
    for n in 0..4000_u64 {
        // Denser and thinner in turn.
        let ns = n * 15_000_000 + (n / 400 % 2) * 3_000_000 * (n % 400) / 2;
        list.push((START + ns, &frames[n as usize % 2][..]));
    }
    list.sort_by_key(|(ns, _)| *ns);
    let later = list.last().unwrap().0 + 20 * SECOND;
    segment(&place.0, 0, list);
    let second = (0..1000_u64).map(|n| (later + n * 10_000_000, &frames[0][..]));
    segment(&place.0, 1, second);
    later + 999 * 10_000_000
}

fn open(server: &Server, width: u32, height: u32, dark: bool) -> Browser {
    let browser = Browser::open(width, height, dark);
    browser.go(&format!("http://{}/", server.address));
    eventually("the page shows a timeline", || {
        browser.data("summary", "polls") != Value::Null
    });
    browser
}

/// How many columns of the chart have something in the colour of packets.
fn columns(browser: &Browser) -> u64 {
    let script = "
        const chart = document.getElementById('chart'), pen = chart.getContext('2d');
        const style = getComputedStyle(document.documentElement);
        pen.save(); pen.fillStyle = style.getPropertyValue('--packets').trim();
        const [r, g, b] = pen.fillStyle.match(/[0-9a-f]{2}/g).map((hex) => parseInt(hex, 16));
        pen.restore();
        const { data, width, height } = pen.getImageData(0, 0, chart.width, chart.height);
        let columns = 0;
        for (let x = 0; x < width; x++) {
            for (let y = 0; y < height; y++) {
                const at = 4 * (y * width + x);
                if (data[at] === r && data[at + 1] === g && data[at + 2] === b) { columns++; break; }
            }
        }
        return columns;";
    browser.run(script).as_u64().unwrap()
}

#[test]
fn a_range_is_brushed_filtered_and_downloaded() {
    let place = TestDir::new("web");
    let last = recording(&place);
    let server = Server::start(&[&place.0]);
    let browser = open(&server, 1200, 1000, false);
    browser.expect("summary", "packets", 5000);
    browser.expect("summary", "bytes", 2000 * 80 + 2000 * 1200 + 1000 * 80);
    assert!(
        browser.text("summary").contains("0 lost · exact"),
        "{}",
        browser.text("summary")
    );
    assert_eq!(
        browser.run("return document.getElementById('empty').hidden"),
        true
    );
    let width = browser
        .run("return document.getElementById('chart').clientWidth")
        .as_f64()
        .unwrap();
    let drawn = columns(&browser) as f64;
    let recorded = 70.0 / ((last - START) as f64 / 1e9);
    let share = drawn / (width - LEFT - RIGHT);
    assert!(
        (share - recorded).abs() < 0.1,
        "{drawn} columns of {width}, {recorded} recorded"
    );
    browser.screenshot("light");

    // The middle third; the page says what that is, to the nanosecond.
    let third = (width - LEFT - RIGHT) / 3.0;
    browser.drag("chart", LEFT + third, LEFT + 2.0 * third);
    eventually("the range is shown", || {
        let packets = browser.data("summary", "packets");
        packets
            .as_str()
            .is_some_and(|text| (1..4999).contains(&text.parse::<u64>().unwrap()))
    });
    let times = ["from", "to"].map(|id| {
        let text = browser.run(&format!("return document.getElementById('{id}').value"));
        vnplug_store::extract::parse_time(text.as_str().unwrap(), 0).unwrap()
    });
    let span = last + 1 - START;
    for (time, expected) in times.iter().zip([START + span / 3, START + span / 3 * 2]) {
        assert!(
            time.abs_diff(expected) < span / 100,
            "{time} is not {expected}"
        );
    }
    assert!(
        !browser.text("summary").contains("within"),
        "{}",
        browser.text("summary")
    );

    browser.write("filter", "udp port 443");
    eventually("it is counted", || {
        browser.data("count", "filter") == "udp port 443"
    });
    let expected = extracted(&[&place.0], times[0], times[1], "udp port 443");
    let file = place.0.join("found");
    browser.click("pcapng");
    browser.downloaded(&file);
    assert!(fs::read(&file).unwrap() == expected);
    let found = by_tcpdump(&file, "udp port 443");
    assert!(found > 100, "{found}");
    browser.expect("count", "packets", found as u64);
    browser.screenshot("zoomed");

    // The command that the page tells finds the same; here its words are enough.
    let command = browser.text("command");
    let told = format!("--from {}.{:09}", times[0] / SECOND, times[0] % SECOND);
    assert!(
        command.contains(&told) && command.contains("'udp port 443'"),
        "{command}"
    );
    browser.click("everything");
    browser.expect("summary", "packets", 5000);
    browser.click("back");
    eventually("it is back", || {
        browser.data("summary", "packets") != "5000"
    });
    assert_eq!(browser.complaints(), [""; 0]);
}

#[test]
fn a_wrong_filter_says_what_is_wrong_and_offers_nothing() {
    let place = TestDir::new("web");
    recording(&place);
    let server = Server::start(&[&place.0]);
    let browser = open(&server, 1200, 1000, true);
    browser.write("filter", "host and or");
    eventually("the error is shown", || {
        browser.text("filter-error").contains("syntax error")
    });
    assert!(browser.text("filter-error").contains("for example"));
    let link = "return document.getElementById('pcapng').hasAttribute('href')";
    assert_eq!(browser.run(link), false);
    browser.screenshot("wrong-filter-dark");
    browser.write("filter", "udp port 53");
    eventually("the error is gone", || {
        browser.text("filter-error").is_empty()
    });
    browser.expect("count", "packets", 3000);
    assert_eq!(browser.run(link), true);
}

#[test]
fn keys_move_and_zoom() {
    let place = TestDir::new("web");
    let last = recording(&place);
    let server = Server::start(&[&place.0]);
    let browser = open(&server, 480, 900, false);
    browser.expect("summary", "packets", 5000);
    let shown = || {
        let value =
            |id: &str| browser.run(&format!("return document.getElementById('{id}').value"));
        ["from", "to"].map(|id| {
            vnplug_store::extract::parse_time(value(id).as_str().unwrap_or_default(), 0)
                .unwrap_or(0)
        })
    };
    let wide = |range: [u64; 2]| range[1] - range[0];
    let all = shown();
    assert_eq!(all, [START, last + 1]);
    browser.screenshot("narrow");
    browser.press("chart", "+");
    eventually("half is shown", || {
        wide(shown()).abs_diff(wide(all) / 2) < 10
    });
    let half = shown();
    browser.press("chart", "\u{e012}");
    eventually("it moved to the left", || {
        shown()[0] < half[0] && wide(shown()) == wide(half)
    });
    browser.press("chart", "\u{e00c}");
    eventually("it is back", || shown() == half);
    browser.press("chart", "\u{e011}");
    eventually("everything is shown", || shown() == all);
    // Nothing is cut off to the right.
    let overflow = browser.run("return document.documentElement.scrollWidth - innerWidth");
    assert!(overflow.as_i64().unwrap() <= 0, "{overflow}");
}

#[test]
fn a_live_recording_grows_in_the_page() {
    let place = TestDir::new("web");
    let server = Server::start(&[&place.0]);
    let browser = open(&server, 1200, 1000, false);
    assert!(
        browser.text("empty").contains("no capture files"),
        "{}",
        browser.text("empty")
    );
    browser.screenshot("empty");
    let mut recorder = recorder(&place.0);
    let frame = udp(443, 400);
    let mut taken = 0;
    for packets in [1, 500, 3000] {
        for _ in 0..packets {
            let lost = u32::from(taken == 1000) * 250;
            take(&mut recorder, START + taken * 7_000_000, &frame, lost);
            taken += 1;
        }
        recorder.flush();
        browser.expect("summary", "packets", taken);
    }
    browser.expect("summary", "lost", 250);
    eventually("the mark is told", || {
        browser.text("recordings").contains("3,501")
    });
    browser.screenshot("live");
    recorder.finish();
    assert_eq!(browser.complaints(), [""; 0]);
}

#[test]
fn one_packet_and_a_huge_gap_can_be_looked_at() {
    let place = TestDir::new("web");
    let server = Server::start(&[&place.0]);
    let frame = udp(443, 400);
    segment(&place.0, 0, [(START, &frame[..])]);
    let browser = open(&server, 1200, 1000, false);
    browser.expect("summary", "packets", 1);
    assert!((1..10).contains(&columns(&browser)));
    browser.screenshot("one-packet");
    let later = START + 400 * 86_400 * SECOND;
    segment(
        &place.0,
        1,
        (0..100).map(|n| (later + n * SECOND, &frame[..])),
    );
    browser.expect("summary", "packets", 101);
    browser.screenshot("huge-gap");
    // The list of files leads to the other end.
    browser.run("document.querySelector('#segments button').click()");
    browser.expect("summary", "packets", 100);
    assert!(columns(&browser) >= 100);
}

#[test]
fn names_and_reasons_are_text() {
    let place = TestDir::new("web");
    let bad = "<img src=x onerror=\"document.title='bad'\">";
    let frame = udp(443, 400);
    let file = segment(&place.0, 0, [(START, &frame[..])]);
    fs::rename(file, place.0.join(format!("{bad}.pcapng"))).unwrap();
    fs::write(place.0.join("broken.pcapng"), "no capture file").unwrap();
    let status = Status {
        recording: bad.into(),
        mark_ns: START,
        losses: vec![Loss {
            from_ns: START,
            to_ns: START,
            packets: 1,
            kind: bad.into(),
            reason: bad.into(),
            ..Loss::default()
        }],
        ..Status::default()
    };
    fs::write(place.0.join("odd.state"), status.to_json(START)).unwrap();
    let server = Server::start(&[&place.0]);
    let browser = open(&server, 1200, 1000, false);
    browser.expect("summary", "packets", 1);
    for table in ["recordings", "losses", "segments"] {
        eventually(table, || browser.text(table).contains(bad));
    }
    eventually("problems", || {
        browser.text("problems").contains("broken.pcapng")
    });
    assert_eq!(browser.run("return document.title"), "vNPlug recordings");
    assert_eq!(browser.run("return document.images.length"), 0);
    assert_eq!(browser.complaints(), [""; 0]);
}

#[test]
fn a_narrow_window_scrolls_its_tables_and_nothing_else() {
    let place = TestDir::new("web");
    recording(&place);
    let server = Server::start(&[&place.0]);
    // The least that Chromium opens is 500.
    let browser = open(&server, 500, 900, false);
    browser.run("document.body.style.width = '400px'");
    eventually("the files are listed", || {
        browser.text("segments").contains(".pcapng")
    });
    let more = "const place = document.querySelector('#segments .scroll');
        return place.scrollWidth > place.clientWidth && document.body.scrollWidth <= 400";
    assert_eq!(browser.run(more), true);
    let line = "return document.getElementById('in').offsetTop === document.getElementById('out').offsetTop";
    assert_eq!(browser.run(line), true);
    assert_eq!(browser.complaints(), [""; 0]);
}

#[test]
fn where_nothing_is_recorded_nothing_is_offered() {
    let place = TestDir::new("web");
    let server = Server::start(&[&place.0]);
    let browser = open(&server, 1200, 900, false);
    let offered = "return document.getElementById('pcapng').hasAttribute('href')";
    eventually("the page says so", || {
        browser
            .text("empty")
            .contains("There are no capture files here yet")
    });
    assert_eq!(browser.run(offered), false);
    assert_eq!(browser.text("count"), "");
    recording(&place);
    eventually("then it is offered", || browser.run(offered) == true);
}
