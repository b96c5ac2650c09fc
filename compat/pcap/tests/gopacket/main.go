// Command gopacket reads a device with gopacket in one goroutine, as programs in Go do, and asks for
// statistics in another one, without a lock.
//
//	gopacket DEVICE COUNT INTERVAL
//
// It reads until the source has ended, and exits with 0 if it saw COUNT packets and the statistics
// say the same.
package main

import (
	"fmt"
	"os"
	"strconv"
	"sync"
	"time"

	"github.com/google/gopacket"
	"github.com/google/gopacket/pcap"
)

func main() {
	if err := run(os.Args[1], os.Args[2], os.Args[3]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(device, wanted, every string) error {
	count, err := strconv.Atoi(wanted)
	if err != nil {
		return err
	}
	interval, err := time.ParseDuration(every)
	if err != nil {
		return err
	}
	handle, err := pcap.OpenLive(device, 65535, true, 50*time.Millisecond)
	if err != nil {
		return err
	}
	if err := handle.SetBPFFilter("udp or tcp"); err != nil {
		return err
	}
	over := make(chan struct{})
	var asking sync.WaitGroup
	asked := 0
	asking.Add(1)
	go func() {
		defer asking.Done()
		for {
			select {
			case <-over:
				return
			case <-time.After(interval):
				if _, err := handle.Stats(); err == nil {
					asked++
				}
			}
		}
	}()
	seen := 0
	packets := gopacket.NewPacketSource(handle, handle.LinkType()).Packets()
	for seen < count {
		select {
		case packet, open := <-packets:
			if !open {
				return fmt.Errorf("the packets ended after %d", seen)
			}
			if packet.NetworkLayer() == nil {
				return fmt.Errorf("a strange packet: %v", packet)
			}
			seen++
		case <-time.After(30 * time.Second):
			return fmt.Errorf("no packet after %d of %d", seen, count)
		}
	}
	close(over)
	asking.Wait()
	stats, err := handle.Stats()
	if err != nil {
		return err
	}
	if stats.PacketsReceived != count || stats.PacketsDropped != 0 || asked == 0 {
		return fmt.Errorf("%d seen, asked %d times, %+v", seen, asked, *stats)
	}
	fmt.Printf("ok %d packets, asked %d times\n", seen, asked)
	return nil
}
