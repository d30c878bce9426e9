// Browsers start no worker for a page that was opened from disk. There, the search's script runs
// in a hidden frame, which such a page may fill as it likes.
if (location.protocol === "file:") {
  window.Worker = class {
    constructor(url) {
      this.waiting = []
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      document.body.append(this.frame)
      const inside = this.frame.contentWindow
      inside.postMessage = data => setTimeout(() => this.onmessage?.({ data }))
      const script = inside.document.createElement("script")
      script.src = url
      script.onload = () => {
        const messages = this.waiting
        this.waiting = null
        messages.forEach(data => this.postMessage(data))
      }
      script.onerror = event => this.onerror?.(event)
      inside.document.body.append(script)
    }
    postMessage(data) {
      if (this.waiting) this.waiting.push(data)
      else this.frame.contentWindow.onmessage({ data })
    }
    terminate() {
      this.frame.remove()
    }
  }
}
